"""The interface of launchers, which start the processes of a run: manifest, request, plan, and the launcher's methods.

The entry points of the group `accel.launchers` are `LauncherManifest` objects. A manifest is data that is read without
torch and without the launcher's code; its class is imported when `accel launch` uses the launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from accel_cli.config.file import ConfigFile
from accel_cli.config.resolved import Ignored, ResolvedSetting, ResolvedSettings
from accel_cli.launch.backends import Selection, backends
from accel_cli.launch.devices import usual_variables, visible
from accel_cli.launch.outer_launch import PLACE_VARIABLES, WRITTEN, written
from accel_cli.launch.settings import LAUNCHER_ONLY, MachineSettings, TorchrunSettings
from accel_state.clusters import Machines
from accel_state.devices.specs import SPECS
from accel_state.errors import NotFound, PluginError, SettingError
from accel_state.plugins import check_targets
from accel_state.settings.environ import ORIGINS, origins_text
from accel_state.settings.installed import Requirement
from accel_state.settings.run import RunSettings
from accel_state.settings.schema import settings_of

__all__ = (
    "AUTO",
    "RUNNER",
    "CalledFor",
    "LaunchPlan",
    "LaunchRequest",
    "Launcher",
    "LauncherManifest",
    "Machine",
    "Program",
    "Script",
)

AUTO: Final = "auto"
"""The value of `--launcher` with which the other settings select the launcher."""

_MESH_TABLE: Final = "parallelism_config."
_NO_CLUSTER: Final = Machines()
_MODULE_PATH: Final = "PYTHONPATH"

# torch's C++ code prints every frame of a store error; the Python traceback has the same message in one line.
_DEFAULT_VARIABLES: Final = {"TORCH_CPP_LOG_LEVEL": "ERROR"}

RUNNER: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "runner.py")
"""The module that starts in every process and runs the script."""

CalledFor = Callable[["LaunchRequest"], "str | None"]
"""Returns the reason to use a launcher for a request, such as "num_machines=2 (--num_machines)", or None."""


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
        called_for: returns the reason to use this launcher if `--launcher` is not set; None if only `--launcher`
            selects it.
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
        if not self.name.replace("-", "_").isidentifier() or self.name == AUTO:
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
        failure = f"Cannot start processes with the launcher {self.name!r}."
        for requirement in self.requires:
            requirement.demand(failure)
        for program in self.programs:
            from shutil import which

            if which(program.name) is None:
                raise NotFound(failure, f"`{program.name}` is not on the path.", program.remedy)


class Script(NamedTuple):
    """The script, module or program that every process runs.

    Args:
        how: "script" for a path, "module" for the name of a module, "program" for an executable that is not Python.
        target: the path or name; empty if the command line has none.
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
    inherited: Mapping[str, str] = MappingProxyType({})
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


@dataclass(frozen=True)
class LaunchRequest:
    """A launch: its settings, what they select, and what to run; the input of a launcher's plan.

    Args:
        settings: every setting of the launch, by name, with its source.
        script: what to run.
        machine: the machine of `accel launch`.
        launcher: the launcher.
        launcher_reason: why it was selected.
        selection: what a switch or `distributed_type` selects, or None.
        backend: the backend that the selection implies, or None if the processes select it.
        cluster: a batch system's description of the machines.
        config: the config file that was read, or None.
        options: options of `accel launch` that repeat this launch elsewhere, without the script.
        quiet: print only the traceback of the process that failed first.
        allocations: whether an allocation of a batch system selects a launcher.
        ignored: values that were given and are not used.
    """

    settings: ResolvedSettings
    script: Script
    machine: Machine
    launcher: LauncherManifest
    launcher_reason: str = ""
    selection: Selection | None = None
    backend: str | None = None
    cluster: Machines = _NO_CLUSTER
    config: ConfigFile | None = None
    options: tuple[str, ...] = ()
    quiet: bool = False
    allocations: bool = True
    ignored: tuple[Ignored, ...] = ()

    @property
    def program(self) -> tuple[str, ...]:
        """The command line of each process, after its interpreter."""
        return (RUNNER, self.script.how, self.script.target, *self.script.arguments)

    @property
    def needs_torchrun(self) -> ResolvedSetting | None:
        """The setting that requires torch.distributed.run to start the processes, or None."""
        settings = self.settings
        if settings["num_machines"].value > 1:
            return settings["num_machines"]
        own = {"max_restarts"} if settings["restart_policy"].value == "auto" else set()
        others = (settings[name] for name in settings_of(TorchrunSettings) if name not in own)
        return next((setting for setting in others if setting.value != setting.definition.default), None)

    @property
    def axes(self) -> list[ResolvedSetting]:
        """The given sizes and implementations of mesh axes."""
        return [setting for name, setting in self.settings.items() if name.startswith(_MESH_TABLE) and setting.is_set]

    def local_processes(self) -> int:
        """Number of processes to start on this machine.

        Raises:
            SettingError: the selection needs several devices, and the machine has only one.
        """
        settings, selection = self.settings, self.selection
        machines = settings.instance(MachineSettings)
        if machines.num_processes is not None:
            return machines.num_processes // machines.num_machines
        if settings["cpu"].value or (selection is not None and selection.alone):
            return 1
        if machines.gpu_ids not in (None, "all"):
            return len([part for part in str(machines.gpu_ids).split(",") if part.strip()])
        count = self.machine.devices()
        several = selection is not None and selection.by_switch and selection.by_device and selection.on_devices
        if selection is not None and several and count * machines.num_machines < 2:
            raise SettingError(
                f"Cannot launch with {selection.source.definition.name} ({selection.source.origin}).",
                "This machine has fewer than two devices.",
                "Remove the switch, or set --num_processes.",
            )
        return count

    def variables(self) -> dict[str, str]:
        """Variables that pass the settings to the processes, on any machine."""
        settings, axes = self.settings, self.axes
        # Axes select the version of an engine, so that its variables are not known yet.
        names = self.selection.names if self.selection is not None and not axes else ()
        launched = (RunSettings, *(one.settings for one in backends() if one.settings and one.name in names))
        variables: dict[str, str] = {}
        for settings_class in self.settings.classes_without(LAUNCHER_ONLY):
            if settings_class in launched:
                variables.update(settings.launched(settings_class))
            variables.update(settings.variables(settings_class))
        switch = self.selection.switch if self.selection is not None else None
        if switch is not None and switch.variable:
            variables[switch.variable] = "true"
        if axes and not settings["use_parallelism_config"].is_set:
            variables[_variable(settings["use_parallelism_config"])] = "true"
        if self.backend is not None and not settings["backend"].is_set:
            variables[_variable(settings["backend"])] = self.backend
        return variables

    def _sources(self) -> dict[str, str]:
        """The setting that the user gave, for each of `variables` that follows from one."""
        sources = {}
        if self.selection is not None:
            switch = self.selection.switch
            names = [_variable(self.settings["backend"]), *([str(switch.variable)] if switch is not None else [])]
            sources = dict.fromkeys(names, self.selection.source.origin)
        if axes := self.axes:
            sources[_variable(self.settings["use_parallelism_config"])] = axes[0].origin
        for settings_class in self.settings.classes_without(LAUNCHER_ONLY):
            sources.update(self.settings.origins(settings_class))
        return sources

    def environment(self, processes: int, **more: str) -> dict[str, str]:
        """Variables of the processes, with `processes` of them on each machine, and the variables `more`."""
        environ = self.machine.environ
        environment = self.variables()
        environment.update(self._of_machine(environment, processes))
        if self.selection is not None and any(one.imports_from_folder for one in self.selection.manifests):
            environment[_MODULE_PATH] = os.pathsep.join(filter(None, (environ.get(_MODULE_PATH, ""), os.getcwd())))
        environment.update(more)
        sources = {
            (name, environment[name]): source
            for name, source in self._sources().items()
            if name in environment and source != f"${name}"
        }
        if sources:
            environment[ORIGINS] = origins_text(sources)
        environment[WRITTEN] = written(environment, environ)
        return environment

    def _of_machine(self, environment: Mapping[str, str], processes: int) -> dict[str, str]:
        """Variables with which several processes share a machine."""
        machines = self.settings.instance(MachineSettings)
        own = dict(visible(machines.gpu_ids)) if machines.gpu_ids is not None else {}
        if machines.num_cpu_threads_per_process is not None:
            own["OMP_NUM_THREADS"] = str(machines.num_cpu_threads_per_process)
        elif processes > 1:
            own["OMP_NUM_THREADS"] = str(max(self.machine.processors // processes, 1))
        shared = SPECS["cpu"].sharing if self.settings["cpu"].value and processes > 1 else {}
        usual = {**_DEFAULT_VARIABLES, **usual_variables(), **shared}
        environ = self.machine.environ
        return {**{name: environ.get(name, usual[name]) for name in usual.keys() - environment.keys()}, **own}

    def plan_of_program(self, argv: tuple[str, ...], processes: int, **more: str) -> LaunchPlan:
        """The plan for a program that starts the processes itself, `processes` of them on each machine.

        Args:
            argv: command line of the program.
            processes: number of processes on each machine.
            more: further variables of the processes.
        """
        return LaunchPlan(
            self.environment(processes, **more),
            argv,
            self.launcher.name,
            inherited=self.machine.environ,
            grace_period=self.settings["grace_period"].value,
            quiet=self.quiet,
        )


def _variable(setting: ResolvedSetting) -> str:
    return str(setting.definition.variable)


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
