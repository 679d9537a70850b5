"""Faults for tests of saving: death, full and broken disks, lost writes and damaged files, at every place there is.

`tracing` runs a function in a forked child and stops it at each of its file operations; `disk` tells what a machine
that lost its power would find; `damage` harms the files of a checkpoint; `exchange` makes the kernel refuse to exchange
two names; `sweeps` puts them together.
"""

from __future__ import annotations

from accel_plugins.testing.faults.damage import damages
from accel_plugins.testing.faults.disk import crashes
from accel_plugins.testing.faults.exchange import refuse_exchange
from accel_plugins.testing.faults.operations import Operation
from accel_plugins.testing.faults.sweeps import (
    Job,
    Tally,
    fail_everywhere,
    harm_everything,
    kill_everywhere,
    lose_power,
)
from accel_plugins.testing.faults.tracing import Ended, Fault, obstacle, run

__all__ = (
    "Ended",
    "Fault",
    "Job",
    "Operation",
    "Tally",
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
