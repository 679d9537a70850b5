"""The backend interface for distributed training, its built-in backends, and the kit that tests a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel_plugins.bundle import Bundle
    from accel_plugins.checkpoint.config import ContinuousSavePolicy, ProjectConfiguration
    from accel_plugins.context import Context
    from accel_plugins.ddp.config import DistributedDataParallelKwargs
    from accel_plugins.ddp.hook_types import DDPCommunicationHookType
    from accel_plugins.deepspeed.config import DeepSpeedPlugin
    from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
    from accel_plugins.manifest import Ability, Axis, Duty, Job, Manifest, Part, Phase
    from accel_plugins.precision.base import Precision
    from accel_plugins.precision.config import AutocastKwargs, GradScalerKwargs
    from accel_plugins.precision.fp8_config import (
        AORecipeKwargs,
        FP8RecipeKwargs,
        MSAMPRecipeKwargs,
        TERecipeKwargs,
    )
    from accel_plugins.precision.fp8_library import FP8BackendType
    from accel_plugins.strategy import Shards, Strategy
    from accel_plugins.transform import Stage, Transform
    from accel_plugins.transforms.compile_config import TorchDynamoPlugin
    from accel_plugins.transforms.tensor_parallel_config import TorchTensorParallelPlugin
    from accel_plugins.wrapped.optimizer import AcceleratedOptimizer
    from accel_plugins.wrapped.scheduler import AcceleratedScheduler
    from accel_plugins.wrapped.unwrap import extract_model_from_parallel, is_compiled_module

__all__ = (
    "AORecipeKwargs",
    "Ability",
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "AutocastKwargs",
    "Axis",
    "Bundle",
    "Context",
    "ContinuousSavePolicy",
    "DDPCommunicationHookType",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "Duty",
    "FP8BackendType",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "Job",
    "MSAMPRecipeKwargs",
    "Manifest",
    "Part",
    "Phase",
    "Precision",
    "ProjectConfiguration",
    "Shards",
    "Stage",
    "Strategy",
    "TERecipeKwargs",
    "TorchDynamoPlugin",
    "TorchTensorParallelPlugin",
    "Transform",
    "extract_model_from_parallel",
    "is_compiled_module",
)

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "accel_plugins.bundle": ("Bundle",),
        "accel_plugins.checkpoint.config": ("ContinuousSavePolicy", "ProjectConfiguration"),
        "accel_plugins.context": ("Context",),
        "accel_plugins.ddp.config": ("DistributedDataParallelKwargs",),
        "accel_plugins.ddp.hook_types": ("DDPCommunicationHookType",),
        "accel_plugins.deepspeed.config": ("DeepSpeedPlugin",),
        "accel_plugins.fsdp.config": ("FullyShardedDataParallelPlugin",),
        "accel_plugins.manifest": (
            "Ability",
            "Axis",
            "Duty",
            "Job",
            "Manifest",
            "Part",
            "Phase",
        ),
        "accel_plugins.precision.base": ("Precision",),
        "accel_plugins.precision.config": (
            "AutocastKwargs",
            "GradScalerKwargs",
        ),
        "accel_plugins.precision.fp8_config": (
            "AORecipeKwargs",
            "FP8RecipeKwargs",
            "MSAMPRecipeKwargs",
            "TERecipeKwargs",
        ),
        "accel_plugins.precision.fp8_library": ("FP8BackendType",),
        "accel_plugins.strategy": (
            "Shards",
            "Strategy",
        ),
        "accel_plugins.transforms.compile_config": ("TorchDynamoPlugin",),
        "accel_plugins.transforms.tensor_parallel_config": ("TorchTensorParallelPlugin",),
        "accel_plugins.transform": (
            "Stage",
            "Transform",
        ),
        "accel_plugins.wrapped.optimizer": ("AcceleratedOptimizer",),
        "accel_plugins.wrapped.scheduler": ("AcceleratedScheduler",),
        "accel_plugins.wrapped.unwrap": (
            "extract_model_from_parallel",
            "is_compiled_module",
        ),
    },
)
