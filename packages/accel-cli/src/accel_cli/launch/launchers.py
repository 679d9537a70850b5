"""Finds the launchers of this package and of others, and selects the one for a launch.

`--launcher NAME` selects a launcher. Without it, each launcher may have a reason in the settings or the environment to
be used; the one with the highest priority is selected.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from accel_cli.config.resolved import ResolvedSetting, ResolvedSettings, label
from accel_cli.launch.check import asks_for_torchrun, shown
from accel_cli.launch.launcher import GROUP, Launcher, LauncherManifest, LaunchPlan, Program
from accel_state.choices import ComputeEnvironment
from accel_state.errors import PluginError, SettingError
from accel_state.plugins import Plugin, contained, plugins_of
from accel_state.settings.installed import Requirement
from accel_state.settings.schema import closest, settings_of
from accel_state.topology import in_batch_script

__all__ = (
    "LOCAL",
    "MPI",
    "SAGEMAKER",
    "SLURM",
    "TORCHRUN",
    "Choice",
    "Supervised",
    "choose_launcher",
    "find_launcher",
    "idle_settings",
    "launcher_names",
    "launcher_settings",
    "load_launcher",
    "offered_launchers",
)

_AUTO: Final = "auto"
_OWN: Final = "accel-cli"
_PLACES: Final = "accel_cli.launch.settings"


def _this_machine(settings: ResolvedSettings, environ: Mapping[str, str]) -> str:
    return "one machine"


def _by_torchrun(settings: ResolvedSettings, environ: Mapping[str, str]) -> str | None:
    reason = asks_for_torchrun(settings)
    return None if reason is None else shown(reason)


def _by_hostfile(settings: ResolvedSettings, environ: Mapping[str, str]) -> str | None:
    hostfile = settings["mpirun_config.mpirun_hostfile"]
    return shown(hostfile) if hostfile.value else None


def _by_sagemaker(settings: ResolvedSettings, environ: Mapping[str, str]) -> str | None:
    place = settings["compute_environment"]
    return None if place.value == ComputeEnvironment.LOCAL_MACHINE.value else shown(place)


def _by_allocation(settings: ResolvedSettings, environ: Mapping[str, str]) -> str | None:
    """An allocation of several nodes, outside its steps, if the settings do not describe machines."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    described = any(settings[name].given for name in ("num_machines", "machine_rank", "main_process_ip"))
    if described or not in_batch_script(environ) or not nodes.isdecimal() or int(nodes) < 2:
        return None
    return f"a Slurm allocation of {nodes} nodes ($SLURM_JOB_NUM_NODES)"


LOCAL: Final = LauncherManifest(
    "local",
    "accel_cli.launch.local:Local",
    "start and supervise the processes on this machine",
    called_for=_this_machine,
)
TORCHRUN: Final = LauncherManifest(
    "torchrun",
    "accel_cli.launch.torchrun:Torchrun",
    "start the processes through torch.distributed.run, on one or several machines",
    called_for=_by_torchrun,
    priority=10,
)
SLURM: Final = LauncherManifest(
    "slurm",
    "accel_cli.launch.slurm:Slurm",
    "start the processes in a Slurm allocation, or submit a Slurm job",
    f"{_PLACES}:SlurmSettings",
    _by_allocation,
    priority=20,
)
MPI: Final = LauncherManifest(
    "mpi",
    "accel_cli.launch.mpi:Mpi",
    "start the processes through mpirun, on the machines of a hostfile",
    f"{_PLACES}:MPISettings",
    _by_hostfile,
    priority=50,
    programs=(Program("mpirun", "Install MPI, for example with: conda install -c conda-forge openmpi"),),
)
SAGEMAKER: Final = LauncherManifest(
    "sagemaker",
    "accel_cli.launch.sagemaker:SageMaker",
    "submit a training job to Amazon SageMaker",
    f"{_PLACES}:SageMakerSettings",
    _by_sagemaker,
    priority=60,
    requires=(Requirement("sagemaker", versions="<3"),),
    elsewhere=True,
)


class Offered(NamedTuple):
    """One entry point of the group: its manifest, or the error that occurred while loading it."""

    extension: Plugin
    manifest: LauncherManifest | None = None
    settings: type | None = None
    error: Exception | None = None


@lru_cache(maxsize=1)
def offered_launchers() -> Mapping[str, tuple[Offered, ...]]:
    """The entry points of the group by name; those of this package are never replaced."""
    found: dict[str, tuple[Offered, ...]] = {}
    for extension in sorted(plugins_of(GROUP), key=lambda one: not _own(one)):
        known = found.get(extension.name, ())
        if not any(_own(one.extension) for one in known):
            found[extension.name] = (*known, _load(extension))
    return found


def _own(extension: Plugin) -> bool:
    return extension.origin.split()[0] == _OWN


def _load(extension: Plugin) -> Offered:
    try:
        manifest: LauncherManifest = extension.load()
        settings = extension._replace(target=manifest.settings).load() if manifest.settings else None
    except Exception as error:
        return Offered(extension, error=error)
    return Offered(extension, manifest, settings)


def launcher_settings() -> tuple[type, ...]:
    """Settings classes of the launchers, each once."""
    found = (one.settings for several in offered_launchers().values() for one in several)
    return tuple(dict.fromkeys(settings for settings in found if settings is not None))


def launcher_names() -> tuple[str, ...]:
    """The valid values of `--launcher`."""
    return tuple(sorted((_AUTO, *offered_launchers())))


def find_launcher(name: str, origin: str) -> LauncherManifest:
    """Find the manifest of a launcher.

    Args:
        name: its name.
        origin: source of the name, for messages.

    Raises:
        SettingError: there is no launcher with that name.
        PluginError: several packages provide it, or it could not be loaded.
    """
    several = list(offered_launchers().get(name, ()))
    asked = f"Cannot use the launcher {name!r} ({origin})."
    if not several:
        names = launcher_names()
        near = closest(name, names)
        raise SettingError(
            asked,
            f"Installed launchers: {', '.join(names)}.",
            f"Did you mean {near!r}?" if near else "Use one of these, or install the package that provides it.",
        )
    offered, *others = several
    if others:
        packages = ", ".join(one.extension.origin for one in several)
        raise PluginError(asked, f"Several packages provide it: {packages}.", "Uninstall all but one of them.")
    if offered.manifest is None:
        package = offered.extension.origin
        remedy = f"Repair, update or remove {package.split()[0]}."
        raise PluginError(asked, f"The launcher of {package} could not be loaded: {offered.error!r}.", remedy)
    return offered.manifest


class Choice(NamedTuple):
    """The launcher of a launch, and the reason for its selection."""

    manifest: LauncherManifest
    reason: str


def choose_launcher(settings: ResolvedSettings, environ: Mapping[str, str]) -> Choice:
    """Select the launcher that the settings name, else the one with the highest priority that has a reason to be used.

    Args:
        settings: every setting of the launch.
        environ: variables that may describe an allocation; empty to ignore allocations.

    Raises:
        SettingError: there is no launcher with the given name.
        PluginError: it could not be loaded, or none is installed.
    """
    named = settings["launcher"]
    if named.value != _AUTO:
        return Choice(find_launcher(named.value, named.origin), shown(named))
    called = []
    for several in offered_launchers().values():
        manifest = several[0].manifest if len(several) == 1 else None
        reason = manifest.called_for(settings, environ) if manifest is not None and manifest.called_for else None
        if manifest is not None and reason is not None:
            called.append(Choice(manifest, reason))
    if not called:
        raise PluginError(
            "Cannot select a launcher.", f"No entry point of the group {GROUP} is installed.", f"Reinstall {_OWN}."
        )
    return max(called, key=lambda choice: choice.manifest.priority)


def load_launcher(manifest: LauncherManifest) -> Launcher:
    """Create an object of the launcher's class.

    Raises:
        PluginError: the class could not be loaded.
    """
    try:
        launcher: Any = Plugin(GROUP, manifest.name, manifest.launcher, "").load()
        with contained():
            made: Launcher = launcher()
    except Exception as error:
        raise PluginError(
            f"Cannot use the launcher {manifest.name!r}.",
            f"{manifest.launcher} could not be loaded: {type(error).__name__}: {error}",
            "Repair or reinstall the package that provides it.",
        ) from error
    return made


def idle_settings(settings: ResolvedSettings, chosen: LauncherManifest) -> list[tuple[str, ResolvedSetting, str]]:
    """Given settings of launchers that are not in use: name, setting, and the launcher that reads it."""
    idle = []
    for several in offered_launchers().values():
        for offered in several:
            manifest = offered.manifest
            if manifest is None or offered.settings is None or manifest.name == chosen.name:
                continue
            for known in settings_of(offered.settings).values():
                setting = settings[label(known)]
                # A setting with a variable is read by the processes, with any launcher.
                if setting.given and known.variable is None and setting.origin.startswith("--"):
                    idle.append((label(known), setting, manifest.name))
    return idle


class Supervised:
    """The base class of launchers for this machine: a subclass plans, and the local launcher executes the plan.

    The local launcher's modules are imported only by `run`, so that planning is fast.
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
