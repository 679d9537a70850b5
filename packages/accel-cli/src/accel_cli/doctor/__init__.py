"""Looking at machines before a run: each by itself, and all of them together."""
