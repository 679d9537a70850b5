"""Tools for tests of these packages and of others that use them: clean state, real processes, devices."""
