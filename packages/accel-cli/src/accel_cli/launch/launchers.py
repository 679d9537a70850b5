"""The installed launchers: their group, the manifests of this package, and all settings classes of a launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from accel_cli.launch.backends import backend_settings
from accel_cli.launch.interface import AUTO, Launcher, LauncherManifest, LaunchRequest, Program
from accel_cli.launch.settings import LAUNCH_CLASSES, LAUNCHER_ONLY
from accel_state.choices import ComputeEnvironment
from accel_state.clusters.systems import in_batch_script
from accel_state.plugins import Interface, LoadedPlugin, PluginGroup
from accel_state.settings.installed import Requirement

__all__ = (
    "LAUNCHERS",
    "LOCAL",
    "MPI",
    "SAGEMAKER",
    "SLURM",
    "TORCHRUN",
    "carried_classes",
    "find_launcher",
    "launch_classes",
    "launcher_settings",
    "launchers",
    "load_launcher",
)

_SETTINGS_MODULE: Final = "accel_cli.launch.settings"


def _on_one_machine(request: LaunchRequest) -> str:
    return "one machine"


def _by_torchrun(request: LaunchRequest) -> str | None:
    reason = request.needs_torchrun
    return None if reason is None else reason.text


def _by_hostfile(request: LaunchRequest) -> str | None:
    hostfile = request.settings["mpirun_config.mpirun_hostfile"]
    return hostfile.text if hostfile.value else None


def _by_sagemaker(request: LaunchRequest) -> str | None:
    place = request.settings["compute_environment"]
    return None if place.value == ComputeEnvironment.LOCAL_MACHINE.value else place.text


def _by_allocation(request: LaunchRequest) -> str | None:
    """An allocation of several nodes, outside its steps, if the settings do not describe machines."""
    environ = request.machine.environ
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    described = any(request.settings[name].is_set for name in ("num_machines", "machine_rank", "main_process_ip"))
    if described or not request.allocations or not in_batch_script(environ):
        return None
    if not nodes.isdecimal() or int(nodes) < 2:
        return None
    return f"a Slurm allocation of {nodes} nodes ($SLURM_JOB_NUM_NODES)"


LOCAL: Final = LauncherManifest(
    "local",
    "accel_cli.launch.local:Local",
    "start and supervise the processes on this machine",
    called_for=_on_one_machine,
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
    f"{_SETTINGS_MODULE}:SlurmSettings",
    _by_allocation,
    priority=20,
)
MPI: Final = LauncherManifest(
    "mpi",
    "accel_cli.launch.mpi:Mpi",
    "start the processes through mpirun, on the machines of a hostfile",
    f"{_SETTINGS_MODULE}:MPISettings",
    _by_hostfile,
    priority=50,
    programs=(Program("mpirun", "Install MPI, for example with: conda install -c conda-forge openmpi"),),
)
SAGEMAKER: Final = LauncherManifest(
    "sagemaker",
    "accel_cli.launch.sagemaker:SageMaker",
    "submit a training job to Amazon SageMaker",
    f"{_SETTINGS_MODULE}:SageMakerSettings",
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


def find_launcher(name: str, origin: str) -> LauncherManifest:
    """Find the manifest of a launcher.

    Args:
        name: its name.
        origin: source of the name, for messages.

    Raises:
        SettingError: there is no launcher with that name.
        PluginError: several packages provide it, or it could not be loaded.
    """
    failure = f"Cannot use the launcher {name!r} ({origin})."
    return _with_settings(LAUNCHERS.find(name, failure, others=(AUTO,))).get(failure)


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


def launcher_settings() -> tuple[type, ...]:
    """Settings classes of the launchers, each once."""
    return tuple(dict.fromkeys(launcher.settings for launcher in launchers() if launcher.settings is not None))


def launch_classes() -> tuple[type, ...]:
    """Settings classes of `accel launch`, of the installed launchers and of the installed backends."""
    return tuple(dict.fromkeys((*LAUNCH_CLASSES, *launcher_settings(), *backend_settings())))


def carried_classes() -> tuple[type, ...]:
    """The settings classes that the started processes read from their environment."""
    return tuple(one for one in launch_classes() if one not in LAUNCHER_ONLY)
