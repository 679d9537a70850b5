"""What is found at the old address `accelerate.utils.dataclasses`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_data.config import DataLoaderConfiguration
    from accel_ops.tree import TensorInformation
    from accel_plugins.blocks import get_module_class_from_name
    from accel_plugins.checkpoint.config import ProjectConfiguration
    from accel_plugins.ddp.config import DistributedDataParallelKwargs
    from accel_plugins.ddp.hook_types import DDPCommunicationHookType
    from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
    from accel_plugins.precision.config import AutocastKwargs, GradScalerKwargs
    from accel_plugins.transforms.compile_config import TorchDynamoPlugin
    from accel_state.gradient import GradientAccumulationPlugin
    from accel_state.kwargs import InitProcessGroupKwargs, KwargsHandler
    from accel_state.labels import (
        BaseEnum,
        ComputeEnvironment,
        CustomDtype,
        DistributedType,
        DynamoBackend,
        EnumWithContains,
        PrecisionType,
        RNGType,
        SageMakerDistributedType,
    )
    from accel_state.mesh_handlers import (
        DeepSpeedSequenceParallelConfig,
        TorchContextParallelConfig,
        TorchTensorParallelConfig,
    )
    from accel_tracking.registry import LoggerType

__all__ = (
    "AutocastKwargs",
    "BaseEnum",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedSequenceParallelConfig",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "EnumWithContains",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "PrecisionType",
    "ProjectConfiguration",
    "RNGType",
    "SageMakerDistributedType",
    "TensorInformation",
    "TorchContextParallelConfig",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "get_module_class_from_name",
)

serve(__name__)
