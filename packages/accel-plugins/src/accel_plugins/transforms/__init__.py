"""Changes of the model that go with any strategy."""
