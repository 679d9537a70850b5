"""Finds the launchers of this package and of others, and selects the one for a launch.

`--launcher NAME` selects a launcher. Without it, each launcher may have a reason in the settings or the environment to
be used; the one with the highest priority is selected.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from accel_cli.config.resolved import ResolvedSettings, label
from accel_cli.launch.check import asks_for_torchrun, shown
from accel_cli.launch.interface import Launcher, LauncherManifest, LaunchPlan, Program
from accel_state.choices import ComputeEnvironment
from accel_state.clusters.slurm import in_batch_script
from accel_state.errors import PluginError
from accel_state.plugins import Interface, LoadedPlugin, PluginGroup
from accel_state.settings.installed import Requirement
from accel_state.settings.schema import settings_of

__all__ = (
    "LAUNCHERS",
    "LOCAL",
    "MPI",
    "SAGEMAKER",
    "SLURM",
    "TORCHRUN",
    "Choice",
    "PlanningLauncher",
    "choose_launcher",
    "find_launcher",
    "launcher_names",
    "launcher_options",
    "launcher_settings",
    "launchers",
    "load_launcher",
)

_AUTO: Final = "auto"
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
    one_machine=True,
)
TORCHRUN: Final = LauncherManifest(
    "torchrun",
    "accel_cli.launch.torchrun:Torchrun",
    "start the processes through torch.distributed.run, on one or several machines",
    called_for=_by_torchrun,
    priority=10,
    one_machine=True,
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


def launcher_settings() -> tuple[type, ...]:
    """Settings classes of the launchers, each once."""
    return tuple(dict.fromkeys(launcher.settings for launcher in launchers() if launcher.settings is not None))


def launcher_names() -> tuple[str, ...]:
    """The valid values of `--launcher`."""
    return tuple(sorted((_AUTO, *LAUNCHERS.names())))


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
    return _with_settings(LAUNCHERS.find(name, failed, others=(_AUTO,))).get(failed)


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
    for launcher in launchers():
        manifest = None if launcher.failure else launcher.value
        reason = manifest.called_for(settings, environ) if manifest is not None and manifest.called_for else None
        if manifest is not None and reason is not None:
            called.append(Choice(manifest, reason))
    if not called:
        raise PluginError(
            "Cannot select a launcher.",
            f"No entry point of the group {LAUNCHERS.group} is installed.",
            "Reinstall accel-cli.",
        )
    return max(called, key=lambda choice: choice.manifest.priority)


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


def launcher_options(chosen: LauncherManifest) -> dict[str, str]:
    """For each setting of the launchers that are not in use: the option that would use it."""
    return {
        label(known): f"--launcher {launcher.name}"
        for launcher in launchers()
        if launcher.settings is not None and launcher.name != chosen.name
        for known in settings_of(launcher.settings).values()
    }


class PlanningLauncher:
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
