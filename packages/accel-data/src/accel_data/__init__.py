"""Data loaders that give each process its own share, dispatch from one process, and resume exactly."""
