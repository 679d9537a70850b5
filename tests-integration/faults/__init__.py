"""Fault injection for tests of saving: killed processes, full and broken disks, lost writes and damaged files.

`tracing` runs a function in a forked child and makes one of its file operations fail. `sweeps` does so for every file
operation, simulates power losses, damages files, and counts the faults after which the folder was valid.
"""
