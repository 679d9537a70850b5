"""Commands of `accel`, one module each; loaded when asked for."""
