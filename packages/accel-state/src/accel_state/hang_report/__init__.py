"""Hang reports: where each rank of a run is when a collective does not complete."""
