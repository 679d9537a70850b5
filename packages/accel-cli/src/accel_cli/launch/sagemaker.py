"""Training jobs of Amazon SageMaker: describes a job as data, and submits it through SageMaker's SDK."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from accel_cli.launch.interface import LaunchPlan, LaunchRequest
from accel_cli.launch.settings import SageMakerSettings
from accel_state.choices import SageMakerDistributedType
from accel_state.errors import LaunchError, NotOffered, SettingError
from accel_state.settings.installed import Requirement

__all__ = ("REQUIREMENT", "SageMaker", "SageMakerJob", "describe_job", "hyperparameters")

REQUIREMENT: Final = Requirement("sagemaker", versions="<3")

_SAGEMAKER_FAILURE: Final = "Cannot describe a training job of SageMaker."
_DISTRIBUTION: Final[Mapping[str, Mapping[str, Any] | None]] = {
    SageMakerDistributedType.NO.value: None,
    SageMakerDistributedType.DATA_PARALLEL.value: {"smdistributed": {"dataparallel": {"enabled": True}}},
}


class SageMakerJob(NamedTuple):
    """The arguments for the SDK.

    Args:
        estimator: arguments of its HuggingFace estimator.
        inputs: location of each channel's data, or None.
    """

    estimator: Mapping[str, Any]
    inputs: Mapping[str, str] | None


class SageMaker:
    """Submits a training job; see `Launcher`. `stop` has no effect on a submitted job."""

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Describe the job, in the plan's `details`; the environment of the plan has what the SDK reads."""
        own = request.settings.instance(SageMakerSettings)
        account = {
            "AWS_PROFILE": own.profile,
            "AWS_ACCESS_KEY_ID": own.aws_access_key_id,
            "AWS_SECRET_ACCESS_KEY": own.aws_secret_access_key,
            "AWS_DEFAULT_REGION": own.region,
        }
        variables = {name: value for name, value in account.items() if value}
        return LaunchPlan(variables, (), "sagemaker", details=describe_job(request, own))

    def run(self, plan: LaunchPlan) -> int:
        """Submit the job, and wait until it has ended.

        Raises:
            Missing: the SDK is not installed.
            LaunchError: SageMaker rejects the job, or the job failed.
        """
        REQUIREMENT.demand("Cannot submit a training job to SageMaker.")
        from sagemaker.huggingface import HuggingFace  # type: ignore[import-not-found, unused-ignore]

        job: SageMakerJob = plan.details
        os.environ.update(plan.environment)
        try:
            HuggingFace(**job.estimator).fit(inputs=job.inputs)
        except Exception as error:
            raise LaunchError(
                "The training job of SageMaker failed.",
                f"{type(error).__name__}: {error}",
                "Check the account, the role and the machine in the config file, and the log of the job.",
            ) from error
        return 0

    def stop(self) -> None:
        """Leave the job alone: it runs at SageMaker, where a user ends it."""


def describe_job(request: LaunchRequest, own: SageMakerSettings) -> SageMakerJob:
    """Describe the job of a request.

    Raises:
        SettingError: the machine, the role or a table is missing, the target is not a Python script, or an argument
            cannot be passed.
        NotOffered: the settings select SageMaker's model parallelism.
    """
    for name in ("ec2_instance_type", "iam_role_name"):
        if not getattr(own, name):
            raise SettingError(_SAGEMAKER_FAILURE, f"{name} is missing.", f"Add {name} to the config file.")
    kind = request.settings["distributed_type"].value or SageMakerDistributedType.NO.value
    if kind not in _DISTRIBUTION:
        raise NotOffered(
            _SAGEMAKER_FAILURE,
            f"distributed_type={kind} is not one of {', '.join(_DISTRIBUTION)}.",
            "Set distributed_type to one of these.",
        )
    _, target, arguments = request.script
    if not target.endswith(".py"):
        raise SettingError(
            _SAGEMAKER_FAILURE, f"{target!r} is not a Python script.", "Give a script with a name that ends with .py."
        )
    metrics = _table(own.sagemaker_metrics_file)
    estimator = {
        "entry_point": os.path.basename(target),
        "source_dir": os.path.dirname(target) or ".",
        "role": own.iam_role_name,
        "image_uri": own.image_uri,
        "transformers_version": own.transformers_version,
        "pytorch_version": own.pytorch_version,
        "py_version": own.py_version,
        "base_job_name": own.base_job_name,
        "instance_count": request.settings["num_machines"].value,
        "instance_type": own.ec2_instance_type,
        "debugger_hook_config": False,
        "distribution": _DISTRIBUTION[kind],
        "hyperparameters": hyperparameters(arguments),
        "environment": {
            **request.variables(),
            "ACCELERATE_USE_SAGEMAKER": "true",
            "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": kind,
        },
        "metric_definitions": [{"Name": name, "Regex": regex} for name, regex in metrics] or None,
        **(request.config.additional if request.config is not None else {}),
    }
    return SageMakerJob(estimator, dict(_table(own.sagemaker_inputs_file)) or None)


def hyperparameters(arguments: Sequence[str]) -> dict[str, Any]:
    """Arguments of a script as SageMaker passes them: values by name, with numbers and bools converted.

    Raises:
        SettingError: an argument has no name or no value.

    Example:
        >>> hyperparameters(["--lr", "0.1", "--model", "small"])
        {'lr': 0.1, 'model': 'small'}
    """
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--") or (not equals and (not rest or rest[0].startswith("--"))):
            raise SettingError(
                _SAGEMAKER_FAILURE,
                f"The script's argument {word!r} has no {'value' if name.startswith('--') else 'name'}.",
                "SageMaker passes only pairs. Write --name value, and a switch as --name true.",
            )
        values[name[2:]] = _value(value if equals else rest.pop(0))
    return values


def _table(path: str | None) -> list[tuple[str, str]]:
    """Rows of two columns, separated by tabs, below a heading."""
    if not path:
        return []
    try:
        with open(path, encoding="utf-8") as file:
            rows = [line.rstrip("\n").split("\t") for line in file if line.strip()][1:]
    except (OSError, ValueError) as error:
        raise SettingError(
            _SAGEMAKER_FAILURE, f"{path} cannot be read: {error}.", "Give a text file with a table of two columns."
        ) from None
    for number, row in enumerate(rows, start=2):
        if len(row) != 2:
            raise SettingError(
                _SAGEMAKER_FAILURE,
                f"{path}:{number} has {len(row)} column(s).",
                "Write two columns per line, separated by a tab.",
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
