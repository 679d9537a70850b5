"""Settings of the launchers of this package, which their manifests name; none imports a launcher."""

from __future__ import annotations

import re
from typing import Any, Final

from accel_cli.config.repeated import REPEATED
from accel_state.settings.run import XLASettings
from accel_state.settings.schema import (
    BOOLEAN,
    TEXT,
    ValueType,
    choice,
    field_of,
    int_at_least,
    setting,
    settings_class,
    settings_of,
)

__all__ = (
    "DEEPSPEED_LAUNCHERS",
    "DeepSpeedLaunchSettings",
    "MPISettings",
    "SageMakerSettings",
    "SlurmSettings",
    "TPUSettings",
)

_TPU: Final = "TPU"
_SLURM: Final = "Slurm"
_DEEPSPEED: Final = "DeepSpeed"
_SAGEMAKER: Final = "Amazon SageMaker"


@settings_class
class TPUSettings:
    """How a run on TPUs is started; see also `accel tpu-config`."""

    main_training_function: str = setting(
        "main",
        flag="--main_training_function",
        key="main_training_function",
        help="Function of the script that every process of a TPU runs.",
        group=_TPU,
    )
    downcast_bf16: bool = field_of(settings_of(XLASettings)["downcast_bf16"])
    tpu_use_cluster: bool = setting(
        False, type=BOOLEAN, flag="--tpu_cluster", key="tpu_use_cluster", help="Run on a TPU pod.", group=_TPU
    )
    tpu_use_sudo: bool = setting(
        False, type=BOOLEAN, flag="--tpu_use_sudo", key="tpu_use_sudo", help="Run commands there as root.", group=_TPU
    )
    tpu_vm: tuple[str, ...] = setting(
        (), type=REPEATED, flag="--vm", key="tpu_vm", help="A machine of the pod; may be repeated.", group=_TPU
    )
    tpu_env: tuple[str, ...] = setting(
        (),
        type=REPEATED,
        flag="--env",
        key="tpu_env",
        help="A variable for the machines of the pod, as NAME=value; may be repeated.",
        group=_TPU,
    )
    tpu_name: str | None = setting(None, key="tpu_name", help="Name of the TPU.")
    tpu_zone: str | None = setting(None, key="tpu_zone", help="Zone of Google Cloud it is in.")
    command_file: str | None = setting(None, key="command_file", help="File with commands for `accel tpu-config`.")
    commands: tuple[str, ...] = setting((), type=REPEATED, key="commands", help="Commands for `accel tpu-config`.")


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


DEEPSPEED_LAUNCHERS: Final = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")
"""Ways in which processes on several machines are started; "standard" is torch.distributed.run on each of them."""


def _deepspeed(name: str, said: str, value_type: ValueType = TEXT) -> Any:
    return setting(None, type=value_type, flag=f"--{name}", key=f"deepspeed_config.{name}", help=said, group=_DEEPSPEED)


@settings_class
class DeepSpeedLaunchSettings:
    """Settings of DeepSpeed's own launcher."""

    deepspeed_hostfile: str | None = _deepspeed("deepspeed_hostfile", "File that names the machines.")
    deepspeed_exclusion_filter: str | None = _deepspeed(
        "deepspeed_exclusion_filter", "Machines and devices to leave out, such as host1@host2:0,2."
    )
    deepspeed_inclusion_filter: str | None = _deepspeed(
        "deepspeed_inclusion_filter", "Machines and devices to use, such as host1@host2:0,2."
    )
    deepspeed_multinode_launcher: str | None = _deepspeed(
        "deepspeed_multinode_launcher", "Who starts the processes on several machines.", choice(*DEEPSPEED_LAUNCHERS)
    )


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
