"""Where the time of a run goes, over all its restarts."""
