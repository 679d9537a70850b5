"""The status of a run, read from outside; it works while the run hangs, and needs no change of the script."""
