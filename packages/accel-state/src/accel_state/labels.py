"""Fixed names: enums for users and config files, and attributes that other libraries read on modules.

The values are those of the interface that this project implements. Code compares members of these enums only inside the
folder of the backend or device family that owns them.
"""

from __future__ import annotations

from enum import Enum, EnumMeta
from typing import Final, Literal

__all__ = (
    "CUDA_DISTRIBUTED_TYPES",
    "DEVICE_MAP",
    "HOOK",
    "OLD_FORWARD",
    "PREPARED",
    "TORCH_DISTRIBUTED_OPERATION_TYPES",
    "Backend",
    "BaseEnum",
    "DistributedType",
    "EnumWithContains",
    "PrecisionType",
    "RNGType",
)


class EnumWithContains(EnumMeta):
    """Metaclass that lets `"value" in SomeEnum` work on every supported Python."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class BaseEnum(Enum, metaclass=EnumWithContains):
    """Enum that `str` formats as its value."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """Values of all members, in order of definition."""
        return [str(member) for member in cls]


class DistributedType(str, Enum, metaclass=EnumWithContains):
    """Values of `distributed_type`: the strategy of a run, or the type of its processes."""

    NO = "NO"
    """One process."""
    MULTI_CPU = "MULTI_CPU"
    """Processes on CPUs."""
    MULTI_GPU = "MULTI_GPU"
    """Processes with a GPU each, of CUDA or ROCm."""
    MULTI_NPU = "MULTI_NPU"
    """Processes with an Ascend NPU each."""
    MULTI_MLU = "MULTI_MLU"
    """Processes with a Cambricon MLU each."""
    MULTI_SDAA = "MULTI_SDAA"
    """Processes with an SDAA device each."""
    MULTI_MUSA = "MULTI_MUSA"
    """Processes with a Moore Threads GPU each."""
    MULTI_XPU = "MULTI_XPU"
    """Processes with an Intel GPU each."""
    MULTI_HPU = "MULTI_HPU"
    """Processes with a Gaudi accelerator each."""
    MULTI_NEURON = "MULTI_NEURON"
    """Processes with a Neuron core each."""
    DEEPSPEED = "DEEPSPEED"
    """The backend is DeepSpeed."""
    FSDP = "FSDP"
    """The backend is FSDP, of either version."""
    XLA = "XLA"
    """The devices are those of torch_xla."""
    MEGATRON_LM = "MEGATRON_LM"
    """The backend is Megatron-LM."""


class PrecisionType(str, BaseEnum):
    """Names of the mixed-precision modes."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(BaseEnum):
    """Random number generators that can be synchronised between processes."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


Backend = Literal["MSAMP", "TE"]
"""Names of the libraries for training in 8-bit floating point, for recipes."""

CUDA_DISTRIBUTED_TYPES: Final = ["DEEPSPEED", "MULTI_GPU", "FSDP", "MEGATRON_LM", "TP"]
"""Types of runs on GPUs."""

TORCH_DISTRIBUTED_OPERATION_TYPES: Final = [
    *CUDA_DISTRIBUTED_TYPES,
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_CPU",
    "MULTI_HPU",
    "MULTI_NEURON",
]
"""Types of runs that use the collectives of torch.distributed."""

DEVICE_MAP: Final = "hf_device_map"
"""Attribute of a model on several devices: mapping of block name to device."""

HOOK: Final = "_hf_hook"
"""Attribute of a module: the hook that runs around its forward."""

OLD_FORWARD: Final = "_old_forward"
"""Attribute of a hooked module: its original forward."""

PREPARED: Final = "_is_accelerate_prepared"
"""Attribute of an object that went through `prepare`: True."""
