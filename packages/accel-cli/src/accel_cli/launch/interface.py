"""The interface of launchers, which start the processes of a run: the request, the plan, and the launcher's methods.

The entry points of the group `accel.launchers` are `LauncherManifest` objects. A manifest is data that is read without
torch and without the launcher's code; its class is imported when `accel launch` uses the launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from accel_cli.config.resolved import ResolvedSettings
from accel_cli.launch.backends import launched_classes, selection_of, selection_origins, selection_variables
from accel_cli.launch.devices import usual_variables, visible
from accel_cli.launch.outer_launch import PLACE_VARIABLES, WRITTEN, written
from accel_cli.launch.settings import MachineSettings
from accel_state.devices.specs import SPECS
from accel_state.errors import NotFound, PluginError
from accel_state.plugins import check_targets
from accel_state.settings.environ import ORIGINS, origins_text
from accel_state.settings.installed import Requirement

__all__ = (
    "RUNNER",
    "CalledFor",
    "LaunchPlan",
    "LaunchRequest",
    "Launcher",
    "LauncherManifest",
    "Machine",
    "Program",
    "Script",
    "common_environment",
    "one_process",
)

RUNNER: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "runner.py")
"""The module that starts in every process and runs the script."""

# torch's C++ code prints every frame of a store error; the Python traceback has the same message in one line.
_USUAL: Final = {"TORCH_CPP_LOG_LEVEL": "ERROR"}

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})

_MODULE_PATH: Final = "PYTHONPATH"

CalledFor = Callable[[ResolvedSettings, Mapping[str, str]], "str | None"]
"""Reads the settings and the variables of a launch, and returns the reason to use a launcher, such as "num_machines=2
(--num_machines)", or None."""


class Program(NamedTuple):
    """A program that a launcher starts.

    Args:
        name: its name on the path, such as "srun".
        remedy: a sentence that explains how to install it.
    """

    name: str
    remedy: str


@dataclass(frozen=True)
class LauncherManifest:
    """The declaration of one launcher.

    Args:
        name: name of the launcher for `--launcher`.
        launcher: "module:class" of the `Launcher`; its constructor takes no arguments.
        help: one line that describes the launcher.
        settings: "module:class" of its settings class, which must not import torch; empty without one.
        called_for: returns the reason, from the settings or the environment, to use this launcher if `--launcher` is
            not set; None if only `--launcher` selects it.
        priority: if several launchers have a reason, the one with the highest priority is selected.
        requires: packages that must be installed.
        programs: programs that must be on the path.
        elsewhere: whether the processes run in another installation of Python, so that this one is not checked.
        one_machine: whether all processes of a run with num_machines=1 are on this machine. They then meet here, and
            the address of another machine is not used.
        elastic: whether the launcher supports a range of machines, such as `--nnodes 1:4`.

    Raises:
        PluginError: a name or target is malformed.
    """

    name: str
    launcher: str
    help: str = ""
    settings: str = ""
    called_for: CalledFor | None = None
    priority: int = 0
    requires: tuple[Requirement, ...] = ()
    programs: tuple[Program, ...] = ()
    elsewhere: bool = False
    one_machine: bool = False
    elastic: bool = False

    def __post_init__(self) -> None:
        if not self.name.replace("-", "_").isidentifier() or self.name == "auto":
            raise PluginError(
                f"Cannot use a launcher with the name {self.name!r}.",
                'A name consists of letters, digits, "-" and "_", starts with a letter, and is not "auto".',
                "Change the name in its LauncherManifest.",
            )
        check_targets("launcher", self.name, {"launcher": self.launcher}, {"settings": self.settings})

    def check_needs(self) -> None:
        """Check that the packages and programs that the launcher requires are installed.

        Raises:
            Missing: a package is not installed, or has another version.
            NotFound: a program is not on the path.
        """
        asked = f"Cannot start processes with the launcher {self.name!r}."
        for requirement in self.requires:
            requirement.demand(asked)
        for program in self.programs:
            from shutil import which

            if which(program.name) is None:
                raise NotFound(asked, f"`{program.name}` is not on the path.", program.remedy)


class Script(NamedTuple):
    """The script, module or program that every process runs.

    Args:
        how: "script" for a path, "module" for the name of a module, "program" for an executable that is not Python.
        target: the path or name.
        arguments: its arguments, which are passed on unchanged.
    """

    how: str
    target: str
    arguments: tuple[str, ...] = ()


class Machine(NamedTuple):
    """The facts about the machine of `accel launch` that a plan needs.

    Args:
        python: path of the interpreter.
        processors: number of CPUs that the processes share.
        devices: returns the number of devices, for settings without a number of processes.
        environ: variables of the launcher, without those of an outer launch.
    """

    python: str
    processors: int
    devices: Callable[[], int]
    environ: Mapping[str, str]


class LaunchRequest(NamedTuple):
    """The input of a launcher's plan.

    Args:
        settings: every setting of the launch, by name, with its origin.
        script: what to run.
        machine: the machine of `accel launch`.
        carried: settings classes that the processes read from their environment.
        backend: the backend that the kind of run implies, or None.
        options: options of `accel launch` that repeat this launch elsewhere, without the script.
        quiet: print only the traceback of the process that failed first.
        additional: the entries of the config file below `additional_args`.
    """

    settings: ResolvedSettings
    script: Script
    machine: Machine
    carried: tuple[type, ...]
    backend: str | None = None
    options: tuple[str, ...] = ()
    quiet: bool = False
    additional: Mapping[str, Any] = _NONE

    @property
    def program(self) -> tuple[str, ...]:
        """The command line of each process, after its interpreter."""
        return (RUNNER, self.script.how, self.script.target, *self.script.arguments)

    def environment(self, processes: int, **more: str) -> dict[str, str]:
        """Variables of the processes, with `processes` of them on each machine, and the variables `more`."""
        environment = common_environment(self.settings, self.carried)
        if self.backend is not None and not self.settings["backend"].given:
            environment[str(self.settings["backend"].setting.variable)] = self.backend
        environment.update(self._of_machine(environment, processes))
        selection = selection_of(self.settings)
        if selection is not None and any(manifest.imports_from_folder for manifest in selection.manifests):
            paths = self.machine.environ.get(_MODULE_PATH, "")
            environment[_MODULE_PATH] = os.pathsep.join(filter(None, (paths, os.getcwd())))
        environment.update(more)
        origins = self._origins(environment)
        if origins:
            environment[ORIGINS] = origins_text(origins)
        environment[WRITTEN] = written(environment, self.machine.environ)
        return environment

    def _origins(self, environment: Mapping[str, str]) -> dict[tuple[str, str], str]:
        """The settings that the user gave, by the variable derived from each and its text."""
        origins = selection_origins(self.settings)
        for settings_class in self.carried:
            origins.update(self.settings.origins(settings_class))
        return {
            (name, environment[name]): origin
            for name, origin in origins.items()
            if name in environment and origin != f"${name}"
        }

    def _of_machine(self, environment: Mapping[str, str], processes: int) -> dict[str, str]:
        """Variables with which several processes share a machine."""
        machines = self.settings.instance(MachineSettings)
        own: dict[str, str] = {}
        if machines.gpu_ids is not None:
            own.update(visible(machines.gpu_ids))
        if machines.num_cpu_threads_per_process is not None:
            own["OMP_NUM_THREADS"] = str(machines.num_cpu_threads_per_process)
        elif processes > 1:
            own["OMP_NUM_THREADS"] = str(max(self.machine.processors // processes, 1))
        shared = SPECS["cpu"].sharing if self.settings["cpu"].value and processes > 1 else {}
        usual = {**_USUAL, **usual_variables(), **shared}
        environ = self.machine.environ
        free = {name: environ.get(name, value) for name, value in usual.items() if name not in environment}
        return {**free, **own}


def common_environment(settings: ResolvedSettings, carried: tuple[type, ...]) -> dict[str, str]:
    """Variables that pass the settings to the processes, on any machine."""
    environment: dict[str, str] = {}
    for settings_class in carried:
        if settings_class in launched_classes(settings):
            environment.update(settings.launched(settings_class))
        environment.update(settings.variables(settings_class))
    return {**environment, **selection_variables(settings)}


class LaunchPlan(NamedTuple):
    """The processes that a launcher will start, and how it supervises them.

    Args:
        environment: variables of every process, in addition to those of the launcher.
        argv: command line of each process or, without `starts_ranks`, of the single process that starts them.
        launcher: name of the launcher that created the plan.
        processes: number of processes that this launch starts on this machine; 1 if it is unknown.
        world_size: number of processes of the run; None if it is unknown.
        starts_ranks: whether `argv` starts one process of the run, not a program that starts them.
        replaces: whether `argv` may replace the process of `accel launch`.
        address: host that serves the store.
        port: port of the store; None for a free one.
        port_origin: source of the port, for messages.
        removed: variables of the launcher that the processes must not inherit.
        inherited: variables of the launcher.
        grace_period: seconds between asking processes to end and killing them.
        prefix_output: whether each line that a process prints begins with its rank.
        environment_file: variable that is set to the path of a file with the environment, or empty.
        hang_report_after: seconds in a collective after which the launcher prints where the processes are, or 0.
        hang_timeout: seconds in a collective after which it ends the run, or None.
        quiet: report nothing but the traceback of the process that failed first.
        restart_policy: whether the processes are restarted after a failure; see `accel_cli.launch.failures`.
        max_restarts: largest number of restarts.
        project_dir: folder of the run, or empty.
        details: data that only the launcher of the plan reads.
    """

    environment: Mapping[str, str]
    argv: tuple[str, ...]
    launcher: str
    processes: int = 1
    world_size: int | None = None
    starts_ranks: bool = False
    replaces: bool = False
    address: str = "127.0.0.1"
    port: int | None = None
    port_origin: str = ""
    removed: tuple[str, ...] = PLACE_VARIABLES
    inherited: Mapping[str, str] = _NONE
    grace_period: float = 30.0
    prefix_output: bool = False
    environment_file: str = ""
    hang_report_after: float = 0.0
    hang_timeout: float | None = None
    quiet: bool = False
    restart_policy: str = "never"
    max_restarts: int = 0
    project_dir: str = ""
    details: Any = None


def one_process(request: LaunchRequest, argv: tuple[str, ...], launcher: str, processes: int) -> LaunchPlan:
    """The plan for a program that starts the processes itself, `processes` of them on each machine."""
    return LaunchPlan(
        request.environment(processes),
        argv,
        launcher,
        inherited=request.machine.environ,
        grace_period=request.settings["grace_period"].value,
        quiet=request.quiet,
    )


class Launcher(Protocol):
    """Starts the processes of a run.

    `accel launch` creates one object for each launch, and calls `plan` and then `run`, both in its main thread.
    """

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Plan what `run` will start. This starts no process, selects no port and writes no file.

        Raises:
            SettingError: a setting cannot be used; `Conflict` when two contradict each other.
            NotOffered: the launcher does not support this kind of script.
        """

    def run(self, plan: LaunchPlan) -> int:
        """Execute the plan, and return the exit code of the run after the last process has ended.

        The exit code is that of the process that failed first, or 128 plus the number of the signal that killed it.
        SIGINT, SIGTERM, SIGHUP and SIGQUIT end the run; when this returns, no process is running.

        Raises:
            LaunchError: the processes could not be started.
        """

    def stop(self) -> None:
        """End the run as SIGTERM does; another thread may call this, even before `run`."""
