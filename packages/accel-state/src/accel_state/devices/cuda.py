"""NVIDIA GPUs, and AMD GPUs that torch drives under the same name (ROCm)."""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar

import torch

from accel_state.devices.base import DeviceFamily
from accel_state.labels import DistributedType

__all__ = ("CUDA",)

_OUT_OF_MEMORY = ("CUDA out of memory.", "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.", "CUBLAS_STATUS_ALLOC_FAILED")


class CUDA(DeviceFamily):
    """GPUs that `torch.cuda` drives."""

    name: ClassVar[str] = "cuda"
    label: ClassVar[DistributedType] = DistributedType.MULTI_GPU
    backend: ClassVar[str] = "nccl"
    timeout: ClassVar[timedelta] = timedelta(minutes=10)
    priority: ClassVar[int] = 100
    rng_key: ClassVar[str | None] = "torch_cuda_manual_seed"
    rng_name: ClassVar[str | None] = "cuda"
    pins_memory: ClassVar[bool] = True

    def present(self) -> bool:
        return torch.cuda.is_available()

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype is torch.float16 or (dtype is torch.bfloat16 and torch.cuda.is_bf16_supported())

    def out_of_memory(self, error: BaseException) -> bool:
        return super().out_of_memory(error) or any(text in str(error) for text in _OUT_OF_MEMORY)
