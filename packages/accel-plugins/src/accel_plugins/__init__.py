"""The backend interface for distributed training, its built-in backends, and the kit that tests a backend."""
