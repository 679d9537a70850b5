"""Functions and classes that exist only for existing scripts; the accel packages define all others."""
