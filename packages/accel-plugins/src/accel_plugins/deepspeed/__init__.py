"""The backend over DeepSpeed."""
