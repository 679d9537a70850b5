"""Settings that every process of a run reads, whichever way it was started."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from accel_state.settings.schema import BOOLEAN, choice, int_at_least, setting

__all__ = (
    "COMPILE_VARIABLE",
    "PROJECT_DIR_VARIABLE",
    "MeshSettings",
    "OutputSettings",
    "ProcessSettings",
    "RunSettings",
    "XLASettings",
)

COMPILE_VARIABLE: Final = "ACCELERATE_DYNAMO_BACKEND"
"""Variable with the backend of `torch.compile`; if it is empty, nothing is compiled."""

PROJECT_DIR_VARIABLE: Final = "ACCEL_PROJECT_DIR"
"""Variable with the folder of the run, for scripts that do not set one."""


_carried: Final = partial(setting, variable="ACCELERATE_{NAME}", flag="--{name}", key="{name}")
"""A setting with a variable, flag and key that are derived from the name of its field."""


@dataclass
class ProcessSettings:
    """The device of a process, and its execution."""

    cpu: bool = setting(
        False,
        type=BOOLEAN,
        variable="ACCELERATE_USE_{NAME}",
        flag="--{name}",
        key="use_{name}",
        question="Do you want to run only on the CPU, even if a GPU or another accelerator is present?",
        help="Use the CPU even if another device is present.",
        group="Hardware",
    )
    device: str | None = setting(
        None,
        variable="ACCELERATE_TORCH_{NAME}",
        help="Device of a single process, such as cuda:1.",
    )
    debug: bool = _carried(
        False,
        type=BOOLEAN,
        variable="ACCELERATE_DEBUG_MODE",
        question="Should every process log more details?",
        help="Log more on every process, and print full tracebacks.",
    )
    cpu_affinity: bool = setting(
        False,
        type=BOOLEAN,
        variable="ACCELERATE_{NAME}",
        flag="--enable_{name}",
        key="enable_{name}",
        question="Should each process run on the processors nearest to its device?",
        help="Pin each process to the CPU cores nearest to its device.",
        group="Hardware",
    )
    fork_launched: bool = setting(
        False,
        type=BOOLEAN,
        variable="{NAME}",
        help="The processes were forked from a notebook; its launcher sets this.",
    )


@dataclass
class OutputSettings:
    """The terminal output of the processes."""

    log_level: str | None = setting(
        None,
        type=choice("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET", fold=str.upper),
        variable="ACCELERATE_{NAME}",
        help="Log level of the loggers from `get_logger`.",
    )
    enable_rich: bool = setting(
        False,
        type=BOOLEAN,
        variable="ACCELERATE_{NAME}",
        help="Format logs with rich if it is installed.",
    )


@dataclass
class RunSettings:
    """How the processes of a run train together."""

    mixed_precision: str = _carried(
        "no",
        type=choice("no", "fp16", "bf16", "fp8"),
        question="Which mixed precision do you want to use?",
        help="Mixed precision of the forward pass.",
        group="Resources",
        launched="no",
    )
    backend: str | None = _carried(
        None,
        variable="ACCEL_{NAME}",
        help="Backend of the run (`accel backends` lists them); by default, the other settings select it.",
        group="Resources",
    )
    project_dir: str | None = _carried(
        None,
        variable=PROJECT_DIR_VARIABLE,
        help="Folder of the run, for its checkpoints, logs, failure reports and time account.",
        group="Supervision",
    )
    gradient_accumulation_steps: int = _carried(
        1,
        type=int_at_least(1),
        help="Micro-batches in each optimizer step.",
        group="Resources",
    )


@dataclass
class MeshSettings:
    """Whether the processes form a mesh; `accel_state.mesh` defines its sizes."""

    use_parallelism_config: bool = _carried(
        False,
        type=BOOLEAN,
        help="Build a device mesh from the ParallelismConfig options.",
        group="ParallelismConfig",
    )
    allow_cp_standalone: bool = setting(
        False,
        type=BOOLEAN,
        variable="ACCELERATE_{NAME}",
        help="Allow context parallelism without a backend that shards parameters.",
    )


@dataclass
class XLASettings:
    """Options of torch_xla, which cannot change once a tensor is on a device."""

    enabled: bool = setting(
        True, type=BOOLEAN, variable="USE_TORCH_XLA", help="Use the devices of torch_xla if it is installed."
    )
    fsdp: bool = setting(
        False,
        type=BOOLEAN,
        variable="ACCEL_XLA_{NAME}",
        help="Shard parameters and batches over all devices of a process (FSDP v2 by SPMD).",
    )
    downcast_bf16: bool = _carried(
        False,
        type=BOOLEAN,
        help="With bf16 on a TPU: store float64 in 32 bits and float32 in bfloat16.",
        group="TPU",
    )
