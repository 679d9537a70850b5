"""How a run spends its time, over all its restarts."""
