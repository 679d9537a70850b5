"""The Accelerator: one object that runs a plain PyTorch training loop on any number of processes."""
