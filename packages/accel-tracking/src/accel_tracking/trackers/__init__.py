"""The trackers that come with this package, one file each; no file knows another."""
