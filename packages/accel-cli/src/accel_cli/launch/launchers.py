"""The manifests of the launchers of this package, and when each is selected without `--launcher`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from accel_cli.launch.interface import LauncherManifest, Program
from accel_state.choices import ComputeEnvironment
from accel_state.clusters.slurm import in_batch_script
from accel_state.settings.installed import Requirement

if TYPE_CHECKING:
    from accel_cli.launch.request import LaunchRequest

__all__ = ("LOCAL", "MPI", "SAGEMAKER", "SLURM", "TORCHRUN")

_SETTINGS: Final = "accel_cli.launch.settings"


def _this_machine(request: LaunchRequest) -> str:
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
    described = any(request.settings[name].given for name in ("num_machines", "machine_rank", "main_process_ip"))
    if described or not request.allocations or not in_batch_script(environ):
        return None
    if not nodes.isdecimal() or int(nodes) < 2:
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
    f"{_SETTINGS}:SlurmSettings",
    _by_allocation,
    priority=20,
)
MPI: Final = LauncherManifest(
    "mpi",
    "accel_cli.launch.mpi:Mpi",
    "start the processes through mpirun, on the machines of a hostfile",
    f"{_SETTINGS}:MPISettings",
    _by_hostfile,
    priority=50,
    programs=(Program("mpirun", "Install MPI, for example with: conda install -c conda-forge openmpi"),),
)
SAGEMAKER: Final = LauncherManifest(
    "sagemaker",
    "accel_cli.launch.sagemaker:SageMaker",
    "submit a training job to Amazon SageMaker",
    f"{_SETTINGS}:SageMakerSettings",
    _by_sagemaker,
    priority=60,
    requires=(Requirement("sagemaker", versions="<3"),),
    elsewhere=True,
)
