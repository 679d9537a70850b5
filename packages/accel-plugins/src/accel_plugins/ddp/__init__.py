"""The backend for data parallelism: each process has the whole model, and gradients are averaged."""
