"""Config files as objects, for scripts that read or write them with the original's classes."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

from accel_cli.config.file import default_path, modern, read_document, read_tables
from accel_cli.config.write import usual_config, write_config
from accel_cli.launch.devices import best_devices
from accel_state.choices import ComputeEnvironment, SageMakerDistributedType
from accel_state.errors import SettingError
from accel_state.labels import DistributedType
from accel_state.settings.run import RunSettings
from accel_state.settings.schema import closest, settings_of

default_config_file: Final = default_path(os.environ)
default_yaml_config_file: Final = default_config_file
default_json_config_file: Final = default_config_file
cache_dir: Final = os.path.dirname(default_config_file)
hf_cache_home: Final = os.path.dirname(cache_dir)

C = TypeVar("C", bound="BaseConfig")

_WORDS_OF_FALSE: Final = {"distributed_type": "NO", "mixed_precision": "no"}
"""What YAML reads as false where these keys say it without quotes."""


@dataclass
class BaseConfig:
    """The fields of every config file."""

    compute_environment: ComputeEnvironment
    distributed_type: DistributedType | SageMakerDistributedType
    mixed_precision: str
    use_cpu: bool
    debug: bool

    _kinds: ClassVar[type[Enum]] = DistributedType

    def __post_init__(self) -> None:
        self.compute_environment = ComputeEnvironment(self.compute_environment)
        self.distributed_type = self._kinds(self.distributed_type)  # type: ignore[assignment]
        if getattr(self, "dynamo_config", None) is None:
            vars(self)["dynamo_config"] = {}

    def to_dict(self) -> dict[str, Any]:
        """Fields by name, as a file holds them: names for members of enums, and neither None nor empty tables."""
        values = {name: value.value if isinstance(value, Enum) else value for name, value in vars(self).items()}
        return {name: value for name, value in values.items() if value is not None and value != {}}

    @staticmethod
    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        """The fields of a config file: current keys, and values for keys that are missing in old files."""
        values = dict(config_dict)
        for key, word in _WORDS_OF_FALSE.items():
            if values.get(key) is False:
                values[key] = word
        values.setdefault("compute_environment", ComputeEnvironment.LOCAL_MACHINE)
        if values["compute_environment"] == ComputeEnvironment.LOCAL_MACHINE and values.get("distributed_type") == "NO":
            values.setdefault("num_processes", 1)
        half = values.pop("fp16", False)
        values.setdefault("mixed_precision", "fp16" if half else None)
        for key in ("use_cpu", "debug", "enable_cpu_affinity"):
            values.setdefault(key, False)
        backend = values.pop("dynamo_backend", None)
        if backend is not None:
            values["dynamo_config"] = {} if str(backend).upper() == "NO" else {"dynamo_backend": backend}
        return values

    @classmethod
    def from_json_file(cls: type[C], json_file: str | None = None) -> C:
        """Read a JSON file; by default the user's config file."""
        return _read(cls, json_file)

    @classmethod
    def from_yaml_file(cls: type[C], yaml_file: str | None = None) -> C:
        """Read a YAML file; by default the user's config file."""
        return _read(cls, yaml_file)

    def to_json_file(self, json_file: str) -> None:
        """Write the file in JSON."""
        with open(json_file, "w", encoding="utf-8") as file:
            file.write(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n")

    def to_yaml_file(self, yaml_file: str) -> None:
        """Write the file in YAML."""
        write_config(str(yaml_file), self.to_dict())


@dataclass
class ClusterConfig(BaseConfig):
    """A config file for the user's machines."""

    num_processes: int = -1
    machine_rank: int = 0
    num_machines: int = 1
    gpu_ids: str | None = None
    main_process_ip: str | None = None
    main_process_port: int | None = None
    rdzv_backend: str | None = "static"
    same_network: bool | None = False
    main_training_function: str = "main"
    enable_cpu_affinity: bool = False
    fp8_config: dict[str, Any] | None = None
    deepspeed_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    parallelism_config: dict[str, Any] | None = None
    megatron_lm_config: dict[str, Any] | None = None
    mpirun_config: dict[str, Any] | None = None
    downcast_bf16: bool = False
    tpu_name: str | None = None
    tpu_zone: str | None = None
    tpu_use_cluster: bool = False
    tpu_use_sudo: bool = False
    command_file: str | None = None
    commands: list[str] = None  # type: ignore[assignment]
    tpu_vm: list[str] = None  # type: ignore[assignment]
    tpu_env: list[str] = None  # type: ignore[assignment]
    dynamo_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(self):
            if field.name.endswith("_config") and getattr(self, field.name) is None:
                setattr(self, field.name, {})


@dataclass
class SageMakerConfig(BaseConfig):
    """A config file for Amazon SageMaker."""

    ec2_instance_type: str
    iam_role_name: str
    image_uri: str | None = None
    profile: str | None = None
    region: str = "us-east-1"
    num_machines: int = 1
    gpu_ids: str = "all"
    base_job_name: str = "accelerate-sagemaker-1"
    pytorch_version: str = "1.10.2"
    transformers_version: str = "4.17.0"
    py_version: str = "py38"
    sagemaker_inputs_file: str | None = None
    sagemaker_metrics_file: str | None = None
    additional_args: dict[str, Any] | None = None
    dynamo_config: dict[str, Any] | None = None
    enable_cpu_affinity: bool = False

    _kinds: ClassVar[type[Enum]] = SageMakerDistributedType


def load_config_from_file(config_file: str | None) -> BaseConfig:
    """The object for a file, of the class that its `compute_environment` selects.

    Raises:
        SettingError: it cannot be read, or holds an unknown key.
    """
    tables = _tables(config_file)
    place = ComputeEnvironment(tables.get("compute_environment", ComputeEnvironment.LOCAL_MACHINE))
    return _read(_CLASSES[place], config_file)


def write_basic_config(mixed_precision: str = "no", save_location: str = default_json_config_file) -> Path | bool:
    """Write the default config file for this machine; return False if the file exists already."""
    path = Path(save_location)
    precision = settings_of(RunSettings)["mixed_precision"].parse(mixed_precision, "argument")
    if path.exists():
        return False
    write_config(str(path), usual_config(best_devices(), precision))
    return path


_CLASSES: dict[ComputeEnvironment, type[BaseConfig]] = {
    ComputeEnvironment.LOCAL_MACHINE: ClusterConfig,
    ComputeEnvironment.AMAZON_SAGEMAKER: SageMakerConfig,
}


def _path(path: str | None) -> str:
    return default_path(os.environ) if path is None else str(path)


def _tables(path: str | None) -> dict[str, Any]:
    return read_tables(_path(path))


def _read(cls: type[C], config_file: str | None) -> C:
    path = _path(config_file)
    values = cls.process_config(_tables(config_file))
    fields = {one.name: one for one in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            line = next((entry.line for entry in map(modern, read_document(path)) if entry.key.startswith(key)), 1)
            near = closest(key, fields)
            raise SettingError(
                f"Cannot read the config file {path}.",
                f"{path}:{line} has the unknown key {key!r}.",
                f"Did you mean {near!r}?" if near else "Remove the line.",
            )
    missing = [name for name, one in fields.items() if one.default is dataclasses.MISSING and name not in values]
    if missing:
        obstacle = f"{', '.join(missing)} is missing in {path}."
        raise SettingError(f"Cannot read the config file {path}.", obstacle, "Write it with `accelerate config`.")
    return cls(**values)
