"""Commands that this package adds to `accel` through the entry-point group `accel.commands`."""
