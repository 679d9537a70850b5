"""Where each process of a run is, told when a collective does not complete."""
