"""Settings that every process of a run reads, however it was started."""

from __future__ import annotations

from typing import Final

from accel_state.settings.schema import BOOLEAN, choice, int_at_least, setting, settings_class

__all__ = ("PROJECT_DIR_VARIABLE", "MeshSettings", "OutputSettings", "ProcessSettings", "RunSettings", "XLASettings")

PROJECT_DIR_VARIABLE: Final = "ACCEL_PROJECT_DIR"
"""Variable with the folder of the run, for scripts that name none."""


@settings_class
class ProcessSettings:
    """The device of a process, and how it runs."""

    cpu: bool = setting(
        False,
        type=BOOLEAN,
        variable="ACCELERATE_USE_CPU",
        flag="--cpu",
        key="use_cpu",
        question="Do you want to run on the CPU only, even if a GPU or another accelerator is there?",
        help="Work on the CPU even if another device is present.",
        group="Hardware",
    )
    device: str | None = setting(
        None,
        variable="ACCELERATE_TORCH_DEVICE",
        help="Device to work on, such as cuda:1, when a process runs alone.",
    )
    debug: bool = setting(
        False,
        type=BOOLEAN,
        variable="ACCELERATE_DEBUG_MODE",
        flag="--debug",
        key="debug",
        question="Should every process report more about what it does?",
        help="Let every process report more about what it does.",
    )
    cpu_affinity: bool = setting(
        False,
        type=BOOLEAN,
        variable="ACCELERATE_CPU_AFFINITY",
        flag="--enable_cpu_affinity",
        key="enable_cpu_affinity",
        question="Should each process run on the processors nearest to its device?",
        help="Run each process on the processors nearest to its device.",
        group="Hardware",
    )
    fork_launched: bool = setting(
        False,
        type=BOOLEAN,
        variable="FORK_LAUNCHED",
        help="Set by a launcher that forks the processes of a notebook.",
    )


@settings_class
class OutputSettings:
    """What the processes write to the terminal, and how."""

    log_level: str | None = setting(
        None,
        type=choice("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET", fold=str.upper),
        variable="ACCELERATE_LOG_LEVEL",
        help="Level of the loggers of `get_logger`.",
    )
    enable_rich: bool = setting(
        False,
        type=BOOLEAN,
        variable="ACCELERATE_ENABLE_RICH",
        help="Write with the library rich where it is installed.",
    )


@settings_class
class RunSettings:
    """How the processes of a run train together."""

    mixed_precision: str = setting(
        "no",
        type=choice("no", "fp16", "bf16", "fp8"),
        variable="ACCELERATE_MIXED_PRECISION",
        flag="--mixed_precision",
        key="mixed_precision",
        question="Which mixed precision do you want to use?",
        help="Mixed precision of the forward pass.",
        group="Resources",
    )
    backend: str | None = setting(
        None,
        variable="ACCEL_BACKEND",
        flag="--backend",
        key="backend",
        help="Backend that owns the run, as `accel backends` lists it; by what was configured when not given.",
        group="Resources",
    )
    project_dir: str | None = setting(
        None,
        variable=PROJECT_DIR_VARIABLE,
        flag="--project_dir",
        key="project_dir",
        help="Folder of the run: of its checkpoints, logs and failures, and of the account of its time.",
        group="Supervision",
    )
    gradient_accumulation_steps: int = setting(
        1,
        type=int_at_least(1),
        variable="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        flag="--gradient_accumulation_steps",
        key="gradient_accumulation_steps",
        help="Micro-batches whose gradients are added up before the optimizer steps.",
        group="Resources",
    )


@settings_class
class MeshSettings:
    """Whether the processes form a mesh; `accel_state.mesh` has its sizes."""

    use_parallelism_config: bool = setting(
        False,
        type=BOOLEAN,
        variable="ACCELERATE_USE_PARALLELISM_CONFIG",
        flag="--use_parallelism_config",
        key="use_parallelism_config",
        help="Build a mesh of the sizes in the ParallelismConfig options.",
        group="ParallelismConfig",
    )
    allow_cp_standalone: bool = setting(
        False,
        type=BOOLEAN,
        variable="ACCELERATE_ALLOW_CP_STANDALONE",
        help="Allow context parallelism without a backend that divides the parameters.",
    )


@settings_class
class XLASettings:
    """How torch_xla computes; fixed before the first tensor is on a device."""

    enabled: bool = setting(
        True, type=BOOLEAN, variable="USE_TORCH_XLA", help="Use the devices of torch_xla where it is installed."
    )
    fsdp: bool = setting(
        False,
        type=BOOLEAN,
        variable="ACCEL_XLA_FSDP",
        help="Divide parameters and batches between all devices that a process has (FSDP v2 by SPMD).",
    )
    downcast_bf16: bool = setting(
        False,
        type=BOOLEAN,
        variable="ACCELERATE_DOWNCAST_BF16",
        flag="--downcast_bf16",
        key="downcast_bf16",
        help="With bf16 on a TPU: hold doubles in 32 bits and floats in bfloat16.",
        group="TPU",
    )
