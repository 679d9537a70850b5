"""Config files and where each effective setting comes from."""
