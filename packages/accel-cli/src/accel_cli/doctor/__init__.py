"""Checks machines before a run: each one separately, and the connections between them."""
