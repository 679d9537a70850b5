"""The settings of a launch: how many processes run where, what starts them, and what happens when one fails.

Settings that the started processes read as well are defined by their readers, in `accel_state.settings.run` and in the
configuration classes of the backends; `launch_classes` names them all.
"""

from __future__ import annotations

import re
from typing import Any, Final

from accel_cli.config.resolved import REPEATED
from accel_cli.launch.kinds import KindSettings
from accel_plugins.precision.config import FP8Settings
from accel_plugins.transforms.config import TorchDynamoPlugin
from accel_state.labels import ComputeEnvironment, DistributedType, SageMakerDistributedType
from accel_state.mesh import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
)
from accel_state.settings.run import MeshSettings, ProcessSettings, RunSettings
from accel_state.settings.schema import (
    BOOLEAN,
    FLOAT,
    TEXT,
    ValueType,
    choice,
    int_at_least,
    setting,
    settings_class,
)

__all__ = (
    "ASKED",
    "CARRIED",
    "LAUNCH_CLASSES",
    "MACHINES",
    "MPISettings",
    "MachineSettings",
    "PlaceSettings",
    "SageMakerSettings",
    "SlurmSettings",
    "SupervisionSettings",
    "TorchrunSettings",
    "fewest_machines",
)

_SLURM: Final = "Slurm"
_SAGEMAKER: Final = "Amazon SageMaker"


@settings_class
class MPISettings:
    """How machines are reached by MPI."""

    mpirun_hostfile: str | None = setting(
        None,
        flag="--mpirun_hostfile",
        key="mpirun_config.mpirun_hostfile",
        help="File that names the machines; mpirun then starts the processes on all of them.",
        group="MPI",
    )


def _sagemaker(default: str | None, name: str, said: str, value_type: ValueType = TEXT) -> Any:
    return setting(default, type=value_type, key=name, help=said)


def _aws(name: str, said: str) -> Any:
    # Not read from their variables, which the SDK of AWS reads by itself: nothing here need show a secret.
    return setting(None, flag=f"--{name}", help=said, group=_SAGEMAKER)


@settings_class
class SageMakerSettings:
    """A training job of SageMaker."""

    ec2_instance_type: str | None = _sagemaker(None, "ec2_instance_type", "Kind of machine.")
    iam_role_name: str | None = _sagemaker(None, "iam_role_name", "Role that the job has.")
    image_uri: str | None = _sagemaker(None, "image_uri", "Container image, instead of the versions.")
    profile: str | None = _sagemaker(None, "profile", "Profile of the AWS command line.")
    region: str | None = _sagemaker("us-east-1", "region", "Region of AWS.")
    base_job_name: str | None = _sagemaker("accelerate-sagemaker-1", "base_job_name", "What its name begins with.")
    pytorch_version: str | None = _sagemaker("1.10.2", "pytorch_version", "Version of torch in the container.")
    transformers_version: str | None = _sagemaker("4.17.0", "transformers_version", "Version of transformers there.")
    py_version: str | None = _sagemaker("py38", "py_version", "Version of Python there.")
    sagemaker_inputs_file: str | None = _sagemaker(
        None, "sagemaker_inputs_file", "Table with the names and places of input data."
    )
    sagemaker_metrics_file: str | None = _sagemaker(
        None, "sagemaker_metrics_file", "Table with the names of metrics and the expressions that find them."
    )
    aws_access_key_id: str | None = _aws("aws_access_key_id", "Key of the AWS account.")
    aws_secret_access_key: str | None = _aws("aws_secret_access_key", "Its secret.")


def _parse_time(text: str) -> str:
    if re.fullmatch(r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2})", text) is None:
        raise ValueError(text)
    return text


_TIME: Final = ValueType("a time as Slurm reads it, such as 90 (minutes), 1:30:00 or 2-12", _parse_time)


def _slurm(name: str, said: str, value_type: ValueType = TEXT, default: object = None, flag: str = "") -> Any:
    return setting(default, type=value_type, flag=flag or f"--{name}", key=name, help=said, group=_SLURM)


@settings_class
class SlurmSettings:
    """A run in an allocation of Slurm, or a job that is submitted from outside."""

    slurm_time: str | None = _slurm("slurm_time", "Time limit of the job, such as 1:30:00.", _TIME)
    slurm_partition: str | None = _slurm("slurm_partition", "Partition of the job.")
    slurm_account: str | None = _slurm("slurm_account", "Account that the job is charged to.")
    slurm_qos: str | None = _slurm("slurm_qos", "Quality of service of the job.")
    slurm_gpus_per_node: str | None = _slurm("slurm_gpus_per_node", "GPUs of each node, such as 8 or h100:8.")
    slurm_cpus_per_task: int | None = _slurm(
        "slurm_cpus_per_task", "Processors of each task of the job; see slurm_tasks.", int_at_least(1)
    )
    slurm_name: str | None = _slurm("slurm_name", "Name of the job; that of the script when not given.")
    slurm_output: str = _slurm(
        "slurm_output", "File for the output of a submitted job; %j is its number.", default="slurm-%j.out"
    )
    slurm_options: tuple[str, ...] = _slurm(
        "slurm_options",
        "A further option of sbatch, such as --slurm_option=--constraint=a100; may be repeated.",
        REPEATED,
        (),
        "--slurm_option",
    )
    slurm_tasks: str = _slurm(
        "slurm_tasks",
        "What a task of Slurm is: a node, on which a launcher starts the processes, or a process.",
        choice("node", "process"),
        "node",
    )
    slurm_signal: int = _slurm(
        "slurm_signal",
        "Seconds before the time limit at which the processes are signalled to save; 0 for never.",
        int_at_least(0),
        120,
    )
    slurm_requeue: bool = _slurm(
        "slurm_requeue",
        "Queue the job again when a node fails, and when the processes saved and ended early.",
        BOOLEAN,
        True,
    )
    slurm_wait: bool = _slurm(
        "slurm_wait",
        "Stay until a submitted job has ended, print its output, and return its exit code.",
        BOOLEAN,
        False,
        "--wait",
    )


_MACHINES: Final = "Machines and processes"
_SUPERVISION: Final = "Supervision"
_TORCHRUN: Final = "torch.distributed.run"


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
    """The least number of machines that a run goes on with, for a value of `num_machines`.

    Example:
        >>> machines = MACHINES.parse("1:4")
        >>> int(machines), fewest_machines(machines), fewest_machines(4)
        (4, 1, 4)
    """
    return machines.fewest if isinstance(machines, _Machines) else machines


MACHINES: Final = ValueType("an integer of at least 1, or a range such as 1:4", _parse_machines, _format_machines)
PORT: Final = ValueType("a port from 0 (choose a free one) to 65535", _parse_port)
SECONDS: Final = ValueType("a number of seconds of at least 0", _parse_seconds)


@settings_class
class PlaceSettings:
    """What a config file says about the place of the run; no flag, since a flag would only repeat others."""

    compute_environment: str = setting(
        ComputeEnvironment.LOCAL_MACHINE.value,
        type=choice(*ComputeEnvironment.list(), fold=str.upper),
        key="compute_environment",
        help="Where the run takes place.",
    )
    distributed_type: str | None = setting(
        None,
        type=choice(*dict.fromkeys((*DistributedType.list(), *SageMakerDistributedType.list())), fold=str.upper),
        key="distributed_type",
        help="Kind of run that a config file was written for.",
    )


@settings_class
class MachineSettings:
    """How many processes run, on which machines, and where they meet."""

    num_processes: int | None = setting(
        None,
        type=int_at_least(1),
        flag="--num_processes",
        key="num_processes",
        question="How many processes in total do you want to use?",
        help="Processes over all machines; one for each device when not given.",
        group=_MACHINES,
    )
    num_machines: int = setting(
        1,
        type=MACHINES,
        flag="--num_machines",
        key="num_machines",
        question="How many machines do you want to use?",
        help="Machines that take part; 1:4 is a range, for a launcher that continues with fewer.",
        group=_MACHINES,
    )
    machine_rank: int = setting(
        0,
        type=int_at_least(0),
        variable="NODE_RANK",
        flag="--machine_rank",
        key="machine_rank",
        question="What is the rank of this machine? (0 for the main one)",
        help="Which of the machines this is, from 0.",
        group=_MACHINES,
    )
    main_process_ip: str | None = setting(
        None,
        variable="MASTER_ADDR",
        flag="--main_process_ip",
        key="main_process_ip",
        question="What is the address of the main machine?",
        help="Address of the machine with rank 0; needed with several machines.",
        group=_MACHINES,
    )
    main_process_port: int | None = setting(
        None,
        type=PORT,
        variable="MASTER_PORT",
        flag="--main_process_port",
        key="main_process_port",
        question="Which port do the processes meet on? (0 chooses a free one on a single machine)",
        help="Port on which the processes meet; on one machine a free one is chosen when it is 0 or not given.",
        group=_MACHINES,
    )
    same_network: bool = setting(
        False,
        type=BOOLEAN,
        flag="--same_network",
        key="same_network",
        help="Whether the machines are in one network; nothing depends on it.",
        group=_MACHINES,
    )
    gpu_ids: str | None = setting(
        None,
        flag="--gpu_ids",
        key="gpu_ids",
        question="Which devices of this machine do you want to use? (numbers separated by commas, or all)",
        help="Devices of this machine to use, such as 0,2; all when not given.",
        group=_MACHINES,
    )
    num_cpu_threads_per_process: int | None = setting(
        None,
        type=int_at_least(1),
        variable="OMP_NUM_THREADS",
        flag="--num_cpu_threads_per_process",
        key="num_cpu_threads_per_process",
        help="CPU threads of each process; several processes share the processors evenly when not given.",
        group=_MACHINES,
    )


@settings_class
class SupervisionSettings:
    """Who starts the processes and looks after them."""

    launcher: str = setting(
        "auto",
        flag="--launcher",
        key="launcher",
        help="What starts the processes: local, torchrun, slurm, mpi, another one that is installed, or "
        "the one that fits; `accel explain` shows which.",
        group=_SUPERVISION,
    )
    grace_period: float = setting(
        30.0,
        type=SECONDS,
        flag="--grace_period",
        key="grace_period",
        help="Seconds between asking processes to end and killing them.",
        group=_SUPERVISION,
    )
    hang_report_after: float = setting(
        120.0,
        type=SECONDS,
        variable="ACCEL_HANG_REPORT_AFTER",
        flag="--hang_report_after",
        key="hang_report_after",
        help="Seconds in a collective after which the launcher prints where every process is; 0 for never.",
        group=_SUPERVISION,
    )
    restart_policy: str = setting(
        "never",
        type=choice("never", "auto"),
        flag="--restart_policy",
        key="restart_policy",
        help="Whether the processes of one machine are started again after a failure: auto restarts after failures "
        "that another attempt may not meet, up to max_restarts times.",
        group=_SUPERVISION,
    )
    hang_timeout: float | None = setting(
        None,
        type=SECONDS,
        variable="ACCEL_HANG_TIMEOUT",
        flag="--hang_timeout",
        key="hang_timeout",
        help="Seconds in a collective after which the launcher ends the run; never when not given.",
        group=_SUPERVISION,
    )
    preflight: bool = setting(
        False,
        type=BOOLEAN,
        flag="--preflight",
        key="preflight",
        help="With several machines: check the links between them first, and start nothing if one fails.",
        group=_SUPERVISION,
    )
    prefix_output: bool = setting(
        False,
        type=BOOLEAN,
        flag="--prefix_output",
        key="prefix_output",
        help="Begin each line that a process prints with its rank.",
        group=_SUPERVISION,
    )


@settings_class
class TorchrunSettings:
    """Settings of torch.distributed.run; each selects this launcher when it differs from its default."""

    max_restarts: int = setting(
        0,
        type=int_at_least(0),
        flag="--max_restarts",
        key="max_restarts",
        help="How often all processes are started again after one failed.",
        group=_TORCHRUN,
    )
    monitor_interval: float = setting(
        0.1,
        type=FLOAT,
        flag="--monitor_interval",
        key="monitor_interval",
        help="Seconds between two looks at the processes.",
        group=_TORCHRUN,
    )
    rdzv_backend: str = setting(
        "static",
        flag="--rdzv_backend",
        key="rdzv_backend",
        help="How the machines find each other.",
        group=_TORCHRUN,
    )
    rdzv_conf: str = setting(
        "",
        flag="--rdzv_conf",
        key="rdzv_conf",
        help="Further options of the rendezvous, such as timeout=60.",
        group=_TORCHRUN,
    )
    role: str = setting(
        "default",
        flag="--role",
        key="role",
        help="Role of the processes, as the logs name it.",
        group=_TORCHRUN,
    )
    log_dir: str | None = setting(
        None,
        flag="--log_dir",
        key="log_dir",
        help="Folder for the output of the processes.",
        group=_TORCHRUN,
    )
    tee: str = setting(
        "0",
        flag="--tee",
        key="tee",
        help="What goes to the log folder and to the terminal: 1 standard output, 2 standard error, 3 both.",
        group=_TORCHRUN,
    )


CARRIED: Final = (
    ProcessSettings,
    RunSettings,
    KindSettings,
    TorchDynamoPlugin,
    MeshSettings,
    ParallelismConfig,
    TorchContextParallelConfig,
    DeepSpeedSequenceParallelConfig,
    FP8Settings,
)
"""Settings that the started processes read back from their environment, besides those of launchers and backends."""

LAUNCH_CLASSES: Final = (
    *CARRIED,
    PlaceSettings,
    MachineSettings,
    SupervisionSettings,
    TorchrunSettings,
    MPISettings,
    SageMakerSettings,
    SlurmSettings,
)
"""Settings classes that `accel launch` always knows; those of launchers and backends come in addition."""

ASKED: Final = (ProcessSettings, RunSettings, MachineSettings, SupervisionSettings, TorchrunSettings, TorchDynamoPlugin)
"""Those whose questions the wizard asks everybody; those of a backend are asked when it is chosen."""
