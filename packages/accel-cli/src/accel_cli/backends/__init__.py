"""What `accel backends` finds out and shows."""
