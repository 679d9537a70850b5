"""Processes, devices, transports and settings: who am I, and how do I reach the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel_state.console import tqdm as tqdm
    from accel_state.errors import AccelError as AccelError
    from accel_state.gradient import GradientAccumulationPlugin as GradientAccumulationPlugin
    from accel_state.gradient import GradientState as GradientState
    from accel_state.hang_report.call_log import Call as Call
    from accel_state.kwargs import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accel_state.kwargs import KwargsHandler as KwargsHandler
    from accel_state.labels import ComputeEnvironment as ComputeEnvironment
    from accel_state.labels import CustomDtype as CustomDtype
    from accel_state.labels import DistributedType as DistributedType
    from accel_state.labels import DynamoBackend as DynamoBackend
    from accel_state.labels import PrecisionType as PrecisionType
    from accel_state.labels import RNGType as RNGType
    from accel_state.labels import SageMakerDistributedType as SageMakerDistributedType
    from accel_state.logging import MultiProcessAdapter as MultiProcessAdapter
    from accel_state.logging import get_logger as get_logger
    from accel_state.memory import clear_device_cache as clear_device_cache
    from accel_state.memory import release_memory as release_memory
    from accel_state.mesh import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
    from accel_state.mesh import ParallelismConfig as ParallelismConfig
    from accel_state.mesh import TorchContextParallelConfig as TorchContextParallelConfig
    from accel_state.mesh import TorchTensorParallelConfig as TorchTensorParallelConfig
    from accel_state.process import PartialState as PartialState
    from accel_state.run_state import AcceleratorState as AcceleratorState

__all__ = (
    "AccelError",
    "AcceleratorState",
    "Call",
    "ComputeEnvironment",
    "CustomDtype",
    "DeepSpeedSequenceParallelConfig",
    "DistributedType",
    "DynamoBackend",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "MultiProcessAdapter",
    "ParallelismConfig",
    "PartialState",
    "PrecisionType",
    "RNGType",
    "SageMakerDistributedType",
    "TorchContextParallelConfig",
    "TorchTensorParallelConfig",
    "clear_device_cache",
    "get_logger",
    "release_memory",
    "tqdm",
)

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "accel_state.console": ("tqdm",),
        "accel_state.errors": ("AccelError",),
        "accel_state.gradient": ("GradientAccumulationPlugin", "GradientState"),
        "accel_state.hang_report.call_log": ("Call",),
        "accel_state.kwargs": ("InitProcessGroupKwargs", "KwargsHandler"),
        "accel_state.labels": (
            "ComputeEnvironment",
            "CustomDtype",
            "DistributedType",
            "DynamoBackend",
            "PrecisionType",
            "RNGType",
            "SageMakerDistributedType",
        ),
        "accel_state.logging": ("MultiProcessAdapter", "get_logger"),
        "accel_state.memory": ("clear_device_cache", "release_memory"),
        "accel_state.mesh": (
            "DeepSpeedSequenceParallelConfig",
            "ParallelismConfig",
            "TorchContextParallelConfig",
            "TorchTensorParallelConfig",
        ),
        "accel_state.process": ("PartialState",),
        "accel_state.run_state": ("AcceleratorState",),
    },
)
