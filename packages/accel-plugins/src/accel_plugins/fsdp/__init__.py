"""The backend that shards parameters, gradients and optimizer state over the processes."""
