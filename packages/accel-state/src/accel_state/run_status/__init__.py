"""What every process of a run does, read from outside: the run may hang, and its script need not know of it."""
