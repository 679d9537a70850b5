"""The backend for devices that torch_xla drives, by replicas or by one process for all devices (SPMD)."""
