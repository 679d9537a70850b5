"""What is found at the old address `accelerate.utils.dataclasses`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_data.config import DataLoaderConfiguration
    from accel_ops.tree import TensorInformation
    from accel_plugins.checkpoint.config import ProjectConfiguration
    from accel_plugins.ddp.config import DistributedDataParallelKwargs
    from accel_plugins.ddp.hook_types import DDPCommunicationHookType
    from accel_plugins.precision.config import AutocastKwargs, GradScalerKwargs
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
    from accel_tracking.registry import LoggerType

__all__ = (
    "AutocastKwargs",
    "BaseEnum",
    "ComputeEnvironment",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "EnumWithContains",
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
)

serve(__name__)
