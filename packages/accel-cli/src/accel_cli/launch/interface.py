"""The interface of launchers, which start the processes of a run: the manifest, the plan, and the launcher's methods.

The entry points of the group `accel.launchers` are `LauncherManifest` objects. A manifest is data that is read without
torch and without the launcher's code; its class is imported when `accel launch` uses the launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from accel_cli.launch.outer_launch import PLACE_VARIABLES
from accel_state.errors import NotFound, PluginError
from accel_state.plugins import Interface, LoadedPlugin, PluginGroup, check_targets
from accel_state.settings.installed import Requirement

if TYPE_CHECKING:
    from accel_cli.launch.request import LaunchRequest

__all__ = (
    "AUTO",
    "LAUNCHERS",
    "RUNNER",
    "CalledFor",
    "LaunchPlan",
    "Launcher",
    "LauncherManifest",
    "Machine",
    "Program",
    "ProgramLauncher",
    "Script",
    "find_launcher",
    "launchers",
    "load_launcher",
)

AUTO: Final = "auto"
"""The value of `--launcher` with which the other settings select the launcher."""

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
        failed = f"Cannot start processes with the launcher {self.name!r}."
        for requirement in self.requires:
            requirement.demand(failed)
        for program in self.programs:
            from shutil import which

            if which(program.name) is None:
                raise NotFound(failed, f"`{program.name}` is not on the path.", program.remedy)


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
        restart_policy: whether the processes are restarted after a failure; see `accel_cli.launch.restarts`.
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


class ProgramLauncher:
    """The base class of launchers that start one program on this machine: a subclass plans it, in `plan`.

    The code that executes the plan is imported only by `run`, so that planning is fast.
    """

    def __init__(self) -> None:
        from accel_cli.launch.local import Supervisor

        self._supervisor = Supervisor()

    def run(self, plan: LaunchPlan) -> int:
        """Execute the plan, and return the exit code of the run."""
        return self._supervisor.run(plan)

    def stop(self) -> None:
        """End the run as SIGTERM does."""
        self._supervisor.stop()


LAUNCHERS: Final[PluginGroup[LauncherManifest]] = PluginGroup(
    "accel.launchers", "launcher", interface=Interface(instance_of=LauncherManifest, named=True), own="first"
)
"""The installed launchers; no package replaces those of this project."""


@lru_cache(maxsize=1)
def launchers() -> tuple[LoadedPlugin[LauncherManifest], ...]:
    """Every installed launcher with its settings class, sorted by name."""
    return tuple(map(_with_settings, LAUNCHERS.loaded()))


def _with_settings(launcher: LoadedPlugin[LauncherManifest]) -> LoadedPlugin[LauncherManifest]:
    return launcher.with_settings(launcher.value.settings) if launcher.value else launcher


def find_launcher(name: str, origin: str) -> LauncherManifest:
    """Find the manifest of a launcher.

    Args:
        name: its name.
        origin: source of the name, for messages.

    Raises:
        SettingError: there is no launcher with that name.
        PluginError: several packages provide it, or it could not be loaded.
    """
    failed = f"Cannot use the launcher {name!r} ({origin})."
    return _with_settings(LAUNCHERS.find(name, failed, others=(AUTO,))).get(failed)


def load_launcher(manifest: LauncherManifest) -> Launcher:
    """Create an object of the launcher's class.

    Raises:
        PluginError: the class could not be loaded.
    """
    interface = Interface(members=("plan", "run", "stop"), called=True)
    launcher: Launcher = LAUNCHERS.part(manifest.name, manifest.launcher, interface).get(
        f"Cannot use the launcher {manifest.name!r}."
    )
    return launcher
