"""Helpers for tests of what is built on the collectives."""
