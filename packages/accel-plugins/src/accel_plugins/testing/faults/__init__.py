"""Faults for tests of saving: death, full and broken disks, lost writes and damaged files, at every place there is.

`tracing` runs a function in a forked child and makes one of its file operations fail; `sweeps` does so at every place,
simulates losses of power and damages files, and counts what is found afterwards.
"""

from __future__ import annotations

from accel_plugins.testing.faults.sweeps import (
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
from accel_plugins.testing.faults.tracing import Ended, Fault, Operation, obstacle, refuse_exchange, run

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
