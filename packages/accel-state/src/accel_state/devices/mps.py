"""The GPU of an Apple computer, through Metal. There is one, and one process works on it."""

from __future__ import annotations

from typing import Any

import torch

from accel_state.devices.rows import ROWS
from accel_state.devices.torch_family import TorchFamily

__all__ = ("MPS",)

_FIRST_WITH_BFLOAT16 = (14, 0)
"""Release of macOS whose Metal computes with bfloat16."""


class MPS(TorchFamily):
    """The GPU that `torch.mps` drives; it shares the memory of the host."""

    def __init__(self) -> None:
        super().__init__(ROWS["mps"])

    def present(self) -> bool:
        return torch.backends.mps.is_available()

    def count(self) -> int:
        return 1

    def device(self, local_rank: int) -> torch.device:
        return torch.device(self.name)

    def seed(self, seed: int) -> None:
        torch.mps.manual_seed(seed)

    def rng_state(self) -> Any:
        return [torch.mps.get_rng_state()]

    def set_rng_state(self, state: Any) -> None:
        torch.mps.set_rng_state(state[0])

    def supports(self, dtype: torch.dtype) -> bool:
        new_enough = torch.backends.mps.is_macos_or_newer(*_FIRST_WITH_BFLOAT16)
        return dtype is torch.float16 or (dtype is torch.bfloat16 and new_enough)

    def total_memory(self, index: int | None = None) -> int:
        """Bytes that Metal recommends not to exceed."""
        return torch.mps.recommended_max_memory()

    def free_memory(self, index: int | None = None) -> int:
        return max(0, self.total_memory() - torch.mps.driver_allocated_memory())

    def used_memory(self, index: int | None = None) -> int:
        return torch.mps.current_allocated_memory()
