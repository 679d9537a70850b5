"""Transports: how tensors and bytes travel between the processes of a run."""
