"""The backend of a process that runs alone."""
