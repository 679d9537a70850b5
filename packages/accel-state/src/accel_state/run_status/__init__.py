"""The status of a run, read from outside: the run may hang, and its script needs no change."""
