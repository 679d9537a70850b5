"""The `accel` command: launch a script on many processes and inspect the environment, without importing torch itself."""
