"""The launchers there are, those of this package and of others, and the one that a launch uses.

`--launcher NAME` names one. Without it the launcher with the highest priority is taken of those that something in the
settings or the environment calls for.
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
from accel_state.settings.extension import Extension, extensions
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
    return "this machine alone"


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
    """An allocation of several nodes, outside its steps, of which the user describes none."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    described = any(settings[name].given for name in ("num_machines", "machine_rank", "main_process_ip"))
    if described or not in_batch_script(environ) or not nodes.isdecimal() or int(nodes) < 2:
        return None
    return f"a Slurm allocation of {nodes} nodes ($SLURM_JOB_NUM_NODES)"


LOCAL: Final = LauncherManifest(
    "local",
    "accel_cli.launch.local:Local",
    "start the processes on this machine and look after them",
    called_for=_this_machine,
)
TORCHRUN: Final = LauncherManifest(
    "torchrun",
    "accel_cli.launch.torchrun:Torchrun",
    "let torch.distributed.run start the processes, on this and further machines",
    called_for=_by_torchrun,
    priority=10,
)
SLURM: Final = LauncherManifest(
    "slurm",
    "accel_cli.launch.slurm:Slurm",
    "start the processes in a Slurm allocation, or submit a job that does",
    f"{_PLACES}:SlurmSettings",
    _by_allocation,
    priority=20,
)
MPI: Final = LauncherManifest(
    "mpi",
    "accel_cli.launch.mpi:Mpi",
    "let mpirun start the processes on the machines of a hostfile",
    f"{_PLACES}:MPISettings",
    _by_hostfile,
    priority=50,
    programs=(Program("mpirun", "Install one, for example with: conda install -c conda-forge openmpi"),),
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
    """One entry point of the group: its manifest, or why that could not be loaded."""

    extension: Extension
    manifest: LauncherManifest | None = None
    settings: type | None = None
    error: Exception | None = None


@lru_cache(maxsize=1)
def offered_launchers() -> Mapping[str, tuple[Offered, ...]]:
    """The entry points of the group by name; one of this package is never replaced."""
    found: dict[str, tuple[Offered, ...]] = {}
    for extension in sorted(extensions(GROUP), key=lambda one: not _own(one)):
        known = found.get(extension.name, ())
        if not any(_own(one.extension) for one in known):
            found[extension.name] = (*known, _load(extension))
    return found


def _own(extension: Extension) -> bool:
    return extension.origin.split()[0] == _OWN


def _load(extension: Extension) -> Offered:
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
    """What `--launcher` takes."""
    return tuple(sorted((_AUTO, *offered_launchers())))


def find_launcher(name: str, origin: str) -> LauncherManifest:
    """The manifest of a launcher.

    Args:
        name: its name.
        origin: who named it.

    Raises:
        SettingError: there is no launcher of that name.
        PluginError: several packages offer it, or it could not be loaded.
    """
    several = list(offered_launchers().get(name, ()))
    asked = f"Cannot use the launcher {name!r} ({origin})."
    if not several:
        names = launcher_names()
        near = closest(name, names)
        raise SettingError(
            asked,
            f"Installed launchers: {', '.join(names)}.",
            f"Did you mean {near!r}?" if near else "Install the package that offers it.",
        )
    offered, *others = several
    if others:
        packages = ", ".join(one.extension.origin for one in several)
        raise PluginError(asked, f"Several packages offer it: {packages}.", "Uninstall all but one of them.")
    if offered.manifest is None:
        package = offered.extension.origin
        remedy = f"Repair, update or remove {package.split()[0]}."
        raise PluginError(asked, f"The one of {package} could not be loaded: {offered.error!r}.", remedy)
    return offered.manifest


class Choice(NamedTuple):
    """The launcher of a launch, and what chose it."""

    manifest: LauncherManifest
    reason: str


def choose_launcher(settings: ResolvedSettings, environ: Mapping[str, str]) -> Choice:
    """The launcher that the settings name, or of those that are called for the one with the highest priority.

    Args:
        settings: every setting of the launch.
        environ: variables that describe an allocation; empty to recognise none.

    Raises:
        SettingError: there is no launcher of the name that was given.
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
            "Cannot choose a launcher.", f"No entry point of the group {GROUP} is installed.", f"Reinstall {_OWN}."
        )
    return max(called, key=lambda choice: choice.manifest.priority)


def load_launcher(manifest: LauncherManifest) -> Launcher:
    """An object of the launcher's class.

    Raises:
        PluginError: the class could not be loaded.
    """
    try:
        launcher: Any = Extension(GROUP, manifest.name, manifest.launcher, "").load()
    except Exception as error:
        raise PluginError(
            f"Cannot use the launcher {manifest.name!r}.",
            f"{manifest.launcher} could not be loaded: {type(error).__name__}: {error}",
            "Repair or reinstall the package that offers it.",
        ) from error
    made: Launcher = launcher()
    return made


def idle_settings(settings: ResolvedSettings, chosen: LauncherManifest) -> list[tuple[str, ResolvedSetting, str]]:
    """What was given for launchers that this launch does not use: name, setting, and the launcher that reads it."""
    idle = []
    for several in offered_launchers().values():
        for offered in several:
            manifest = offered.manifest
            if manifest is None or offered.settings is None or manifest.name == chosen.name:
                continue
            for known in settings_of(offered.settings).values():
                setting = settings[label(known)]
                # One with a variable is read by the processes.
                if setting.given and known.variable is None and setting.origin.startswith("--"):
                    idle.append((label(known), setting, manifest.name))
    return idle


class Supervised:
    """The base class of a launcher whose plan is for this machine: it plans, and that of `local` starts and supervises.

    What that one imports is imported once there is a run, and not where only the manifest is read.
    """

    def __init__(self) -> None:
        from accel_cli.launch.local import Supervisor

        self._supervisor = Supervisor()

    def run(self, plan: LaunchPlan) -> int:
        """Start what the plan says and return the exit code of the run."""
        return self._supervisor.run(plan)

    def stop(self) -> None:
        """End the run as SIGTERM does."""
        self._supervisor.stop()
