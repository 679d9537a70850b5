"""Checkpoints: the files in a folder, and the protocol that makes a folder valid atomically."""
