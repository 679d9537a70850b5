"""Fixed names that config files, launches, device maps and `torch.compile` read; training without them needs none.

The values are those of the interface that this project implements.
"""

from __future__ import annotations

from enum import Enum

from accel_state.labels import BaseEnum, EnumWithContains

__all__ = ("ComputeEnvironment", "CustomDtype", "DynamoBackend", "SageMakerDistributedType")


class ComputeEnvironment(str, Enum, metaclass=EnumWithContains):
    """Where a configured run takes place."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class SageMakerDistributedType(str, Enum, metaclass=EnumWithContains):
    """Kinds of distribution that SageMaker offers."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class DynamoBackend(str, BaseEnum):
    """Names of the backends that `torch.compile` takes, in the upper case of config files."""

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
