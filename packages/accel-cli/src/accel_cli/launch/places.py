"""Settings of places that have a launcher of their own: a TPU, machines reached by MPI, Amazon SageMaker."""

from __future__ import annotations

from typing import Any, Final

from accel_cli.config.repeated import REPEATED
from accel_state.settings.run import XLASettings
from accel_state.settings.schema import BOOLEAN, TEXT, ValueType, field_of, setting, settings_class, settings_of

__all__ = ("MPISettings", "SageMakerSettings", "TPUSettings")

_TPU: Final = "TPU"
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
