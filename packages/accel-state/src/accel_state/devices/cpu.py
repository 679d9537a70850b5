"""The CPU as a device family; always present and of the lowest priority."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from accel_state.devices.base import DeviceFamily
from accel_state.labels import DistributedType

__all__ = ("CPU",)


class CPU(DeviceFamily):
    """The host's processors; all processes of a node share them."""

    name: ClassVar[str] = "cpu"
    label: ClassVar[DistributedType] = DistributedType.MULTI_CPU
    backend: ClassVar[str] = "gloo"

    def present(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def device(self, local_rank: int) -> torch.device:
        return torch.device("cpu")

    def seed(self, seed: int) -> None:
        """Nothing is left to do: `torch.manual_seed` seeds the CPU's generator."""

    def rng_state(self) -> Any:
        return None

    def set_rng_state(self, state: Any) -> None:
        """Nothing is left to do: the CPU's generator is torch's own."""

    def current_rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_current_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def empty_cache(self) -> None:
        """The host's allocator keeps no cache to give back."""

    def synchronize(self) -> None:
        """Work on the host is finished when its call returns."""

    def out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)
