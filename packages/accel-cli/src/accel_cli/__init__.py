"""The `accel` command: launch a script on many processes and inspect what is installed, without importing torch."""
