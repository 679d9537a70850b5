"""Processes, devices, transports and settings of a PyTorch program: the answer to `who am I`."""
