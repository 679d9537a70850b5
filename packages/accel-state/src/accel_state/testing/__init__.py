"""What tests of this project and of packages built on it share: clean state, real processes, devices."""
