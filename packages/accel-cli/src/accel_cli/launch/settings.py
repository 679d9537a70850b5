"""The settings of a launch: number of processes and machines, the launcher, and the reaction to failures.

Settings that the started processes read too are defined by their readers, in `accel_state.settings.run` and in the
configuration classes of the backends; `launch_classes` names them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from accel_cli.config.resolved import REPEATED
from accel_cli.launch.backends import SwitchSettings
from accel_plugins.precision.config import FP8Settings
from accel_plugins.transforms.config import TorchDynamoPlugin
from accel_state.choices import ComputeEnvironment, SageMakerDistributedType
from accel_state.labels import DistributedType
from accel_state.mesh import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
)
from accel_state.settings.run import MeshSettings, ProcessSettings, RunSettings
from accel_state.settings.schema import (
    BOOLEAN,
    FLOAT,
    ValueType,
    choice,
    int_at_least,
    setting,
)

__all__ = (
    "ASKED",
    "LAUNCHER_ONLY",
    "LAUNCH_CLASSES",
    "MACHINES",
    "WITHOUT_EFFECT",
    "MPISettings",
    "MachineSettings",
    "SageMakerSettings",
    "SlurmSettings",
    "SupervisionSettings",
    "TargetSettings",
    "TorchrunSettings",
    "fewest_machines",
)


@dataclass
class MPISettings:
    """Settings of the MPI launcher."""

    mpirun_hostfile: str | None = setting(
        None,
        flag="--{name}",
        key="mpirun_config.{name}",
        help="Hostfile of MPI; mpirun then starts the processes on its machines.",
        group="MPI",
    )


_of_file: Final = partial(setting, key="{name}")
"""A setting that only config files can contain."""

# The SDK of AWS reads these variables itself, so that this program never handles the secret.
_aws: Final = partial(setting, flag="--{name}", group="Amazon SageMaker")


@dataclass
class SageMakerSettings:
    """A training job of SageMaker."""

    ec2_instance_type: str | None = _of_file(help="Type of the machine (instance).")
    iam_role_name: str | None = _of_file(help="IAM role of the job.")
    image_uri: str | None = _of_file(help="Container image, in place of the versions below.")
    profile: str | None = _of_file(help="Profile of the AWS command line.")
    region: str | None = _of_file("us-east-1", help="Region of AWS.")
    base_job_name: str | None = _of_file("accelerate-sagemaker-1", help="Prefix of the job name.")
    pytorch_version: str | None = _of_file("1.10.2", help="Version of torch in the container.")
    transformers_version: str | None = _of_file("4.17.0", help="Version of transformers in the container.")
    py_version: str | None = _of_file("py38", help="Version of Python in the container.")
    sagemaker_inputs_file: str | None = _of_file(help="File with a table of the names and locations of input data.")
    sagemaker_metrics_file: str | None = _of_file(
        help="File with a table of metric names and the regular expressions that find them."
    )
    aws_access_key_id: str | None = _aws(help="Access key of the AWS account.")
    aws_secret_access_key: str | None = _aws(help="Secret of the access key.")


_slurm: Final = partial(setting, flag="--{name}", key="{name}", group="Slurm")


@dataclass
class SlurmSettings:
    """A run in an allocation of Slurm, or a job that is submitted from outside."""

    slurm_options: tuple[str, ...] = _slurm(
        (),
        type=REPEATED,
        flag="--slurm_option",
        help="Option of sbatch, such as --slurm_option=--time=1:30:00; may be repeated.",
    )
    slurm_signal: int = _slurm(
        120,
        type=int_at_least(0),
        help="Seconds before the time limit at which the processes get a signal to save; 0 for never.",
    )
    slurm_requeue: bool = _slurm(
        True,
        type=BOOLEAN,
        help="Requeue the job after a node failure, and after the processes saved and ended early.",
    )
    slurm_wait: bool = _slurm(
        False,
        type=BOOLEAN,
        flag="--wait",
        help="Wait for the submitted job, print its output, and return its exit code.",
    )


_machine: Final = partial(setting, flag="--{name}", key="{name}", group="Machines and processes")
_supervision: Final = partial(setting, flag="--{name}", key="{name}", group="Supervision")
_torchrun: Final = partial(setting, flag="--{name}", key="{name}", group="torch.distributed.run")


def _parse_port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise ValueError(text)
    return port


def _parse_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError(text)
    return seconds


class _Machines(int):
    """The largest number of machines of a run that continues with fewer."""

    fewest: int


def _parse_machines(text: str) -> int:
    first, colon, last = text.strip().partition(":")
    fewest, most = int(first), int(last if colon else first)
    if not 1 <= fewest <= most:
        raise ValueError(text)
    if fewest == most:
        return most
    machines = _Machines(most)
    machines.fewest = fewest
    return machines


def _format_machines(machines: int) -> str:
    fewest = fewest_machines(machines)
    return str(int(machines)) if fewest == machines else f"{fewest}:{int(machines)}"


def fewest_machines(machines: int) -> int:
    """The smallest number of machines with which a run continues, for a value of `num_machines`.

    Example:
        >>> machines = MACHINES.parse("1:4")
        >>> int(machines), fewest_machines(machines), fewest_machines(4)
        (4, 1, 4)
    """
    return machines.fewest if isinstance(machines, _Machines) else machines


MACHINES: Final = ValueType(
    "an integer of at least 1, or a range such as 1:4", _parse_machines, _format_machines, metavar="N"
)
PORT: Final = ValueType("a port from 0 (choose a free one) to 65535", _parse_port, metavar="N")
SECONDS: Final = ValueType("a number of seconds of at least 0", _parse_seconds, metavar="N")


@dataclass
class TargetSettings:
    """The place and the backend that a config file is for; there are no flags, because switches select a backend."""

    compute_environment: str = _of_file(
        ComputeEnvironment.LOCAL_MACHINE.value,
        type=choice(*(one.value for one in ComputeEnvironment), fold=str.upper),
        help="Where the run takes place.",
    )
    distributed_type: str | None = _of_file(
        None,
        type=choice(
            *dict.fromkeys(one.value for kind in (DistributedType, SageMakerDistributedType) for one in kind),
            fold=str.upper,
        ),
        help="Backend or devices that a config file was written for.",
    )


@dataclass
class MachineSettings:
    """The number of processes, the machines, and the rendezvous."""

    num_processes: int | None = _machine(
        None,
        type=int_at_least(1),
        question="How many processes in total do you want to use?",
        help="Total number of processes; by default one for each device.",
    )
    num_machines: int = _machine(
        1,
        type=MACHINES,
        question="How many machines do you want to use?",
        help="Number of machines; 1:4 is a range, for a launcher that continues with fewer.",
    )
    machine_rank: int = _machine(
        0,
        type=int_at_least(0),
        variable="NODE_RANK",
        question="What is the rank of this machine? (0 for the main machine)",
        help="Rank of this machine, from 0.",
    )
    main_process_ip: str | None = _machine(
        None,
        variable="MASTER_ADDR",
        question="What is the address of the main machine?",
        help="Address of the machine with rank 0; required with several machines.",
    )
    main_process_port: int | None = _machine(
        None,
        type=PORT,
        variable="MASTER_PORT",
        question="Which port should the processes use to connect? (0 selects a free one on a single machine)",
        help="Port on which the processes meet; on one machine a free one is chosen when it is 0 or not given.",
    )
    gpu_ids: str | None = _machine(
        None,
        question="Which devices of this machine do you want to use? (numbers separated by commas, or all)",
        help="Devices of this machine to use, such as 0,2; by default all.",
    )
    num_cpu_threads_per_process: int | None = _machine(
        None,
        type=int_at_least(1),
        variable="OMP_NUM_THREADS",
        help="CPU threads of each process; several processes share the processors evenly when not given.",
    )


@dataclass
class SupervisionSettings:
    """The launcher, and how it supervises the processes."""

    launcher: str = _supervision(
        "auto",
        help="What starts the processes: local, torchrun, slurm, mpi, another one that is installed, or "
        "the one that fits; `accel explain` shows which.",
    )
    grace_period: float = _supervision(
        30.0,
        type=SECONDS,
        help="Seconds between SIGTERM and SIGKILL when the processes must end.",
    )
    hang_report_after: float = _supervision(
        120.0,
        type=SECONDS,
        variable="ACCEL_{NAME}",
        help="Seconds in one collective after which the launcher prints where each process is; 0 for never.",
    )
    restart_policy: str = _supervision(
        "never",
        type=choice("never", "auto"),
        help="Whether the processes of one machine are started again after a failure: auto restarts after failures "
        "that another attempt may not meet, up to max_restarts times.",
    )
    hang_timeout: float | None = _supervision(
        None,
        type=SECONDS,
        variable="ACCEL_{NAME}",
        help="Seconds in one collective after which the launcher ends the run; never when not given.",
    )
    preflight: bool = _supervision(
        False,
        type=BOOLEAN,
        help="Check the links between machines first, and start nothing if one fails.",
    )
    prefix_output: bool = _supervision(
        False,
        type=BOOLEAN,
        help="Prefix each line of output with the rank of its process.",
    )


@dataclass
class TorchrunSettings:
    """Settings of torch.distributed.run; a value other than the default selects this launcher."""

    max_restarts: int = _torchrun(
        0,
        type=int_at_least(0),
        help="Largest number of restarts of all processes after failures.",
    )
    monitor_interval: float = _torchrun(
        0.1,
        type=FLOAT,
        help="Seconds between checks of the processes.",
    )
    rdzv_backend: str = _torchrun(
        "static",
        help="Rendezvous backend of torch.distributed.",
    )
    rdzv_conf: str = _torchrun(
        "",
        help="Further options of the rendezvous, such as timeout=60.",
    )
    role: str = _torchrun(
        "default",
        help="Role of the processes in the logs.",
    )
    log_dir: str | None = _torchrun(
        None,
        help="Folder for files with the output of the processes.",
    )
    tee: str = _torchrun(
        "0",
        help="Streams to copy to the terminal and to the log folder: 1 standard output, 2 standard error, 3 both.",
    )


WITHOUT_EFFECT: Final = ("--same_network",)
"""Switches of the original that change nothing here; command lines and files may contain them."""

LAUNCHER_ONLY: Final = (TargetSettings, MachineSettings, SupervisionSettings, TorchrunSettings)
"""Settings classes that only the launcher reads, not the processes that it starts."""

LAUNCH_CLASSES: Final = (
    ProcessSettings,
    RunSettings,
    SwitchSettings,
    TorchDynamoPlugin,
    MeshSettings,
    ParallelismConfig,
    TorchContextParallelConfig,
    DeepSpeedSequenceParallelConfig,
    FP8Settings,
    *LAUNCHER_ONLY,
    MPISettings,
    SageMakerSettings,
    SlurmSettings,
)
"""Settings classes that `accel launch` always knows, besides those of launchers and backends."""

ASKED: Final = (ProcessSettings, RunSettings, MachineSettings, SupervisionSettings, TorchrunSettings, TorchDynamoPlugin)
"""Settings classes with questions that the wizard always asks; a backend's questions follow when it is selected."""
