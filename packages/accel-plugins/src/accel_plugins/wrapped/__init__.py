"""The wrappers of optimizers and schedulers that `prepare` returns."""
