"""Starts processes: from flags and files to a plan, and from the plan to a run."""
