"""NVIDIA GPUs, and AMD GPUs that torch drives under the same name (ROCm)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from accel_state.devices.nvidia import WITHOUT_P2P, check_cuda_p2p_ib_support, lacks_p2p
from accel_state.devices.rows import ROWS
from accel_state.devices.torch_family import TorchFamily
from accel_state.errors import NotOffered
from accel_state.topology import Topology

__all__ = ("CUDA", "check_cuda_fp8_capability")

_OUT_OF_MEMORY = ("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.", "CUBLAS_STATUS_ALLOC_FAILED")

_FP8_CAPABILITY = (8, 9)
"""Compute capability of the Ada generation, the first with 8-bit floating point units."""

_MXFP8_CAPABILITY = (10, 0)
"""Compute capability of the Blackwell generation."""


class CUDA(TorchFamily):
    """GPUs that `torch.cuda` drives."""

    ring_attention = True

    def __init__(self) -> None:
        super().__init__(ROWS["cuda"])

    @property
    def is_rocm(self) -> bool:
        """Whether the GPUs are AMD's."""
        return torch.version.hip is not None

    def settle(self, topology: Topology) -> None:
        """See that NCCL does not wait for what the GPUs cannot do.

        Raises:
            NotOffered: the GPUs cannot reach each other directly, the driver does not know, and NCCL was not told.
        """
        told = all(variable in os.environ for variable in WITHOUT_P2P)
        if topology.world_size == 1 or told or not lacks_p2p(torch.cuda.get_device_name()):
            return
        if not check_cuda_p2p_ib_support():
            raise NotOffered(
                f"{topology.world_size} processes on GPUs of the kind {torch.cuda.get_device_name()} were asked for.",
                "They cannot reach each other's memory, and this driver does not tell NCCL so.",
                f"Set {' and '.join(f'{name}=1' for name in WITHOUT_P2P)} (`accel launch` does), or update the driver.",
            )

    def scales_fp8_by_blocks(self) -> bool:
        """Whether the current GPU computes with 8-bit numbers that share a scale in blocks."""
        return torch.cuda.get_device_capability() >= _MXFP8_CAPABILITY

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype is torch.float16 or (dtype is torch.bfloat16 and torch.cuda.is_bf16_supported())

    def out_of_memory(self, error: BaseException) -> bool:
        spoken = isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
        return super().out_of_memory(error) or spoken

    def numa_node(self, index: int) -> int | None:
        # Several processes may share a device, so the index of a process may be past the last device.
        facts: Any = torch.cuda.get_device_properties(index % max(self.count(), 1))
        address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        try:
            node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        except OSError:
            return None
        return node if node >= 0 else None


def check_cuda_fp8_capability() -> bool:
    """Whether the current NVIDIA GPU computes with 8-bit floating point numbers; False where there is none."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= _FP8_CAPABILITY
