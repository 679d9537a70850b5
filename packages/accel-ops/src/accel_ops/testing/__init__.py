"""Tools for tests of code that uses the collectives."""
