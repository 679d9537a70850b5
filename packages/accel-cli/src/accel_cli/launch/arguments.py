"""The settings of a launch: how many processes run where, who starts them, and what happens when one fails.

Settings that the started processes read as well stand with their readers, in `accel_state.settings.run` and in the
configuration classes of the backends; `launch_classes` names them all.
"""

from __future__ import annotations

from typing import Final

from accel_cli.launch.kinds import KindSettings
from accel_cli.launch.launcher_settings import (
    DeepSpeedLaunchSettings,
    MPISettings,
    SageMakerSettings,
    SlurmSettings,
    TPUSettings,
)
from accel_plugins.precision.config import FP8Settings
from accel_plugins.transforms.config import TorchDynamoPlugin
from accel_state.labels import ComputeEnvironment, DistributedType, SageMakerDistributedType
from accel_state.mesh import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
)
from accel_state.settings.run import MeshSettings, ProcessSettings, RunSettings
from accel_state.settings.schema import BOOLEAN, FLOAT, ValueType, choice, int_at_least, setting, settings_class

__all__ = (
    "ASKED",
    "CARRIED",
    "LAUNCH_CLASSES",
    "MachineSettings",
    "PlaceSettings",
    "SupervisionSettings",
    "TorchrunSettings",
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
        type=int_at_least(1),
        flag="--num_machines",
        key="num_machines",
        question="How many machines do you want to use?",
        help="Machines that take part; `accel launch` runs once on each.",
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
        help="What starts the processes: local, torchrun, slurm, mpi, deepspeed, tpu, sagemaker, a launcher of another "
        "package, or the one that fits.",
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
        help="With several machines: let them meet first, and start nothing when something is wrong between them.",
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
    TPUSettings,
)
"""Settings that the started processes read back from their environment; those of backends come in addition."""

LAUNCH_CLASSES: Final = (
    *CARRIED,
    PlaceSettings,
    MachineSettings,
    SupervisionSettings,
    TorchrunSettings,
    DeepSpeedLaunchSettings,
    MPISettings,
    SageMakerSettings,
    SlurmSettings,
)
"""Every settings class of this package that `accel launch` knows."""

ASKED: Final = (ProcessSettings, RunSettings, MachineSettings, SupervisionSettings, TorchrunSettings, TorchDynamoPlugin)
"""Those whose questions the wizard asks everybody; those of a backend are asked when it is chosen."""
