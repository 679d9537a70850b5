"""Commands of `accel`, one module each, which is loaded when the command runs."""
