"""Experiment trackers behind one small interface."""
