"""The parts of a launch: the script, the machine, and the plan of the processes to start."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from accel_cli.launch.mpi import find_mpi

__all__ = ("RUNNER", "LaunchPlan", "Machine", "Script")

RUNNER: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "runner.py")
"""The module that every process starts with and that runs the script."""


class Script(NamedTuple):
    """What every process runs.

    Args:
        how: "script" for a path, "module" for the name of a module, "program" for something that is not Python.
        target: the path or name.
        arguments: what is passed on, untouched.
    """

    how: str
    target: str
    arguments: tuple[str, ...] = ()


class Machine(NamedTuple):
    """What the plan has to know about the machine.

    Args:
        python: path of the interpreter.
        processors: CPUs that the processes share.
        devices: returns the number of devices, for settings without a number of processes.
        environ: variables of the launcher itself, those of an outer launch left out.
        mpi: asked for the family of the installed mpirun, when it is to start the processes.
    """

    python: str
    processors: int
    devices: Callable[[], int]
    environ: Mapping[str, str]
    mpi: Callable[[], str] = find_mpi


class LaunchPlan(NamedTuple):
    """What is going to be started.

    Args:
        environment: variables that every process gets in addition to the launcher's own.
        argv: command line of each process; with another runner than "spawner", of the one process that starts them.
        runner: who starts the processes: "spawner", "torchrun", "deepspeed", "mpirun" or "tpu".
        processes: number of processes that this launcher looks after on this machine.
        address: host that serves the store.
        port: port of the store; None lets the spawner choose a free one.
        removed: variables of the launcher that the processes may not see.
        grace_period: seconds between asking processes to end and killing them.
        prefix_output: whether each line that a process prints begins with its rank.
        environment_file: variable that is to name a file with the environment, or empty.
        hang_report_after: seconds in a collective after which the launcher prints where the processes are, or 0.
        hang_timeout: seconds in a collective after which it ends the run, or None.
    """

    environment: Mapping[str, str]
    argv: tuple[str, ...]
    runner: str
    processes: int = 1
    address: str = "127.0.0.1"
    port: int | None = None
    removed: tuple[str, ...] = ()
    grace_period: float = 30.0
    prefix_output: bool = False
    environment_file: str = ""
    hang_report_after: float = 0.0
    hang_timeout: float | None = None
