"""Fault injection for tests of saving: killed processes, full and broken disks, lost writes and damaged files.

`tracing` runs a function in a forked child and makes one of its file operations fail. `sweeps` does so for every file
operation, simulates power losses, damages files, and counts the faults after which the folder was valid.
"""

from __future__ import annotations

from faults.sweeps import (
    Outcome,
    Tally,
    Workload,
    crashes,
    damages,
    fail_everywhere,
    harm_everything,
    kill_everywhere,
    lose_power,
)
from faults.tracing import Ended, Fault, Operation, obstacle, refuse_exchange, run

__all__ = (
    "Ended",
    "Fault",
    "Operation",
    "Outcome",
    "Tally",
    "Workload",
    "crashes",
    "damages",
    "fail_everywhere",
    "harm_everything",
    "kill_everywhere",
    "lose_power",
    "obstacle",
    "refuse_exchange",
    "run",
)
