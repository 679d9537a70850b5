"""The trackers of this package, one module each; none imports another."""
