"""The backend for devices of torch_xla: one process per device, or one process for all devices (SPMD)."""
