"""From settings to a plan: a pure function, so that tests compare what would be started as data.

Everything the plan depends on is handed in. Nothing is started, no file is read and no port is chosen here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from accel_cli.config.effective import Effective
from accel_cli.launch.arguments import MachineSettings, SupervisionSettings
from accel_cli.launch.check import asks_for_torchrun, check_launch
from accel_cli.launch.devices import usual_variables, visible
from accel_cli.launch.nested import PLACE_VARIABLES, WRITTEN, written
from accel_cli.launch.torchrun import torchrun_argv
from accel_state.devices.rows import ROWS

__all__ = ("RUNNER", "LaunchPlan", "Machine", "Script", "make_plan")

RUNNER: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "runner.py")
"""The module that every process starts with and that runs the script."""

# torch's C++ side prints every frame of an error of the store; the traceback says the same in one line.
_USUAL: Final = {"TORCH_CPP_LOG_LEVEL": "ERROR"}


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
        devices: asked for the number of devices, when no number of processes was given.
        environ: variables of the launcher itself, those of an outer launch left out.
    """

    python: str
    processors: int
    devices: Callable[[], int]
    environ: Mapping[str, str]


class LaunchPlan(NamedTuple):
    """What is going to be started.

    Args:
        environment: variables that every process gets in addition to the launcher's own.
        argv: command line of each process; with "torchrun", of the one process that starts them.
        runner: "spawner" or "torchrun".
        processes: number of processes on this machine.
        address: host that serves the store.
        port: port of the store; None lets the spawner choose a free one.
        removed: variables of the launcher that the processes may not see.
        grace_period: seconds between asking processes to end and killing them.
        prefix_output: whether each line that a process prints begins with its rank.
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


def make_plan(
    effective: Effective, script: Script, machine: Machine, carried: tuple[type, ...], backend: str | None = None
) -> LaunchPlan:
    """The plan that follows from the settings.

    Args:
        effective: every setting of the launch.
        script: what to run.
        machine: where to run it.
        carried: settings classes that the processes read back from their environment.
        backend: the backend that owns the run, where it follows from the kind of run in a config file.

    Raises:
        SettingError: a setting cannot be used here; `Conflict` when two contradict each other.
        NotOffered: the run is meant for a place that this launcher does not reach.
    """
    check_launch(effective)
    machines = effective.instance(MachineSettings)
    supervision = effective.instance(SupervisionSettings)
    local = _local_processes(effective, machines, machine)
    environment = _environment(effective, machines, machine, carried, local)
    if backend is not None and not effective["backend"].given:
        environment[str(effective["backend"].setting.variable)] = backend
    environment[WRITTEN] = written(environment, machine.environ)
    program = (RUNNER, script.how, script.target, *script.arguments)
    if supervision.launcher == "torchrun" or asks_for_torchrun(effective) is not None:
        argv = (machine.python, *torchrun_argv(effective, local, program))
        return LaunchPlan(environment, argv, "torchrun", local, grace_period=supervision.grace_period)
    return LaunchPlan(
        environment,
        (machine.python, *program),
        "spawner",
        processes=local,
        address=machines.main_process_ip or "127.0.0.1",
        port=machines.main_process_port or None,
        removed=PLACE_VARIABLES,
        grace_period=supervision.grace_period,
        prefix_output=supervision.prefix_output,
    )


def _local_processes(effective: Effective, machines: MachineSettings, machine: Machine) -> int:
    """Processes to start on this machine."""
    if machines.num_processes is not None:
        return machines.num_processes // machines.num_machines
    if effective["cpu"].value or effective["distributed_type"].value == "NO":
        return 1
    if machines.gpu_ids not in (None, "all"):
        return len([part for part in str(machines.gpu_ids).split(",") if part.strip()])
    return machine.devices()


def _environment(
    effective: Effective, machines: MachineSettings, machine: Machine, carried: tuple[type, ...], local: int
) -> dict[str, str]:
    """Variables that all processes get."""
    environment: dict[str, str] = {}
    for settings_class in carried:
        environment.update(effective.variables(settings_class))
    if machines.gpu_ids is not None:
        environment.update(visible(machines.gpu_ids))
    if machines.num_cpu_threads_per_process is not None:
        environment["OMP_NUM_THREADS"] = str(machines.num_cpu_threads_per_process)
    elif local > 1:
        environment["OMP_NUM_THREADS"] = str(max(machine.processors // local, 1))
    shared = ROWS["cpu"].sharing if effective["cpu"].value and local > 1 else {}
    for name, value in {**_USUAL, **usual_variables(), **shared}.items():
        environment.setdefault(name, machine.environ.get(name, value))
    return environment
