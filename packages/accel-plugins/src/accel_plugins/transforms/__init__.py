"""Changes of the model that work with any strategy."""
