"""Checkpoints: the files of one folder, and the protocol by which a folder becomes valid all at once."""
