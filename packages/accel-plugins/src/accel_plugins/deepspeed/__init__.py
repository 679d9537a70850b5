"""The backend that trains with DeepSpeed."""
