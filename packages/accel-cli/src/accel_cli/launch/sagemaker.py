"""Training jobs of Amazon SageMaker: describes a job as data, and submits it through SageMaker's SDK."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from accel_cli.config.resolved import ResolvedSettings
from accel_cli.launch.interface import LaunchPlan
from accel_cli.launch.settings import SageMakerSettings
from accel_state.choices import SageMakerDistributedType
from accel_state.errors import LaunchError, NotOffered, SettingError
from accel_state.settings.installed import Requirement

if TYPE_CHECKING:
    from accel_cli.launch.interface import LaunchRequest

__all__ = ("REQUIREMENT", "SageMaker", "SageMakerJob", "describe_job", "hand_in")

REQUIREMENT: Final = Requirement("sagemaker", versions="<3")

_FAILED: Final = "Cannot describe a training job of SageMaker."
_DISTRIBUTION: Final[Mapping[str, Mapping[str, Any] | None]] = {
    SageMakerDistributedType.NO.value: None,
    SageMakerDistributedType.DATA_PARALLEL.value: {"smdistributed": {"dataparallel": {"enabled": True}}},
}


@dataclass(frozen=True)
class SageMakerJob:
    """The arguments for the SDK.

    Args:
        estimator: arguments of its HuggingFace estimator.
        inputs: location of each channel's data, or None.
        variables: variables of this process that the SDK reads.
    """

    estimator: Mapping[str, Any]
    inputs: Mapping[str, str] | None
    variables: Mapping[str, str]


class SageMaker:
    """Submits a training job; see `Launcher`. `stop` has no effect on a submitted job."""

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Describe the job, in the plan's `details`."""
        environment = request.variables()
        _, target, arguments = request.script
        additional = request.config.additional if request.config is not None else {}
        job = describe_job(request.settings, target, arguments, environment, additional)
        return LaunchPlan(environment, (), "sagemaker", details=job)

    def run(self, plan: LaunchPlan) -> int:
        """Submit the job, and wait until it has ended.

        Raises:
            Missing: the SDK is not installed.
            LaunchError: SageMaker rejects the job, or the job failed.
        """
        hand_in(plan.details)
        return 0

    def stop(self) -> None:
        """Nothing."""


def describe_job(
    resolved: ResolvedSettings,
    target: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    further: Mapping[str, Any] | None = None,
) -> SageMakerJob:
    """Describe the job from the settings.

    Args:
        resolved: every setting of the launch.
        target: the script.
        arguments: its arguments, all as `--name value`.
        environment: variables of its processes.
        further: arguments of the estimator from `additional_args` of the config file.

    Raises:
        SettingError: the machine, the role or a table is missing, the target is not a Python script, or an argument
            cannot be passed.
        NotOffered: the settings select SageMaker's model parallelism.
    """
    settings = resolved.instance(SageMakerSettings)
    for name in ("ec2_instance_type", "iam_role_name"):
        if not getattr(settings, name):
            raise SettingError(_FAILED, f"{name} is missing.", f"Add {name} to the config file.")
    kind = resolved["distributed_type"].value or SageMakerDistributedType.NO.value
    if kind not in _DISTRIBUTION:
        raise NotOffered(
            _FAILED,
            f"distributed_type={kind} is not one of {', '.join(_DISTRIBUTION)}.",
            "Set distributed_type to one of these.",
        )
    if not target.endswith(".py"):
        raise SettingError(
            _FAILED, f"{target!r} is not a Python script.", "Give a script with a name that ends with .py."
        )
    metrics = _table(settings.sagemaker_metrics_file)
    estimator = {
        "entry_point": os.path.basename(target),
        "source_dir": os.path.dirname(target) or ".",
        "role": settings.iam_role_name,
        "image_uri": settings.image_uri,
        "transformers_version": settings.transformers_version,
        "pytorch_version": settings.pytorch_version,
        "py_version": settings.py_version,
        "base_job_name": settings.base_job_name,
        "instance_count": resolved["num_machines"].value,
        "instance_type": settings.ec2_instance_type,
        "debugger_hook_config": False,
        "distribution": _DISTRIBUTION[kind],
        "hyperparameters": hyperparameters(arguments),
        "environment": {
            **environment,
            "ACCELERATE_USE_SAGEMAKER": "true",
            "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": kind,
        },
        "metric_definitions": [{"Name": name, "Regex": regex} for name, regex in metrics] or None,
        **(further or {}),
    }
    inputs = dict(_table(settings.sagemaker_inputs_file)) or None
    return SageMakerJob(estimator, inputs, _account(settings))


def hyperparameters(arguments: Sequence[str]) -> dict[str, Any]:
    """Arguments of a script as SageMaker passes them: values by name, with numbers and bools converted.

    Raises:
        SettingError: an argument has no name or no value.

    Example:
        >>> hyperparameters(["--lr", "0.1", "--model", "small"])
        {'lr': 0.1, 'model': 'small'}
    """
    found: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--") or (not equals and (not rest or rest[0].startswith("--"))):
            raise SettingError(
                _FAILED,
                f"The script's argument {word!r} has no {'value' if name.startswith('--') else 'name'}.",
                "SageMaker passes only pairs. Write --name value, and a switch as --name true.",
            )
        found[name[2:]] = _value(value if equals else rest.pop(0))
    return found


def hand_in(job: SageMakerJob) -> None:
    """Submit the job, and wait until it has ended.

    Raises:
        Missing: the SDK is not installed.
        LaunchError: SageMaker rejects the job, or the job failed.
    """
    REQUIREMENT.demand("Cannot submit a training job to SageMaker.")
    from sagemaker.huggingface import HuggingFace  # type: ignore[import-not-found, unused-ignore]

    os.environ.update(job.variables)
    try:
        HuggingFace(**job.estimator).fit(inputs=job.inputs)
    except Exception as error:
        raise LaunchError(
            "The training job of SageMaker failed.",
            f"{type(error).__name__}: {error}",
            "Check the account, the role and the machine in the config file, and the log of the job.",
        ) from error


def _account(settings: SageMakerSettings) -> dict[str, str]:
    values = {
        "AWS_PROFILE": settings.profile,
        "AWS_ACCESS_KEY_ID": settings.aws_access_key_id,
        "AWS_SECRET_ACCESS_KEY": settings.aws_secret_access_key,
        "AWS_DEFAULT_REGION": settings.region,
    }
    return {name: value for name, value in values.items() if value}


def _table(path: str | None) -> list[tuple[str, str]]:
    """Rows of two columns, separated by tabs, below a heading."""
    if not path:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            rows = [line.rstrip("\n").split("\t") for line in file if line.strip()][1:]
    except (OSError, ValueError) as error:
        raise SettingError(
            _FAILED, f"{path} cannot be read: {error}.", "Give a text file with a table of two columns."
        ) from None
    for number, row in enumerate(rows, start=2):
        if len(row) != 2:
            raise SettingError(
                _FAILED, f"{path}:{number} has {len(row)} column(s).", "Write two columns per line, separated by a tab."
            )
    return [(row[0], row[1]) for row in rows]


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
