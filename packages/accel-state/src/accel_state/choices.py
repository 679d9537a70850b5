"""Enums for config files, launches, device maps and `torch.compile`; training without these imports none of them.

The values are those of the interface that this project implements.
"""

from __future__ import annotations

from enum import Enum

from accel_state.labels import BaseEnum, EnumWithContains

__all__ = ("ComputeEnvironment", "CustomDtype", "DynamoBackend", "SageMakerDistributedType")


class ComputeEnvironment(str, Enum, metaclass=EnumWithContains):
    """Where a configured run executes."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(str, Enum, metaclass=EnumWithContains):
    """Types of distributed training on SageMaker."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class DynamoBackend(str, BaseEnum):
    """Names of the backends of `torch.compile`, in upper case as in config files."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class CustomDtype(Enum, metaclass=EnumWithContains):
    """Data types narrower than a byte, or without a torch dtype, that device maps can count."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"
