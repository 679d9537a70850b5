"""Optimizers, schedulers and models as `prepare` gives them back, and the way from a prepared model to the user's."""
