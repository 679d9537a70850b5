"""Config files and where each resolved setting comes from."""
