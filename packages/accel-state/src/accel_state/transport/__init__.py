"""Transports: they send tensors and bytes between the processes of a run."""
