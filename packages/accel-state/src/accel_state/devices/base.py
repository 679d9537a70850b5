"""The interface of a device family: everything the rest of the project asks of a kind of device.

A package that brings a family subclasses `DeviceFamily` and offers the class through the entry-point group
`accel.devices`. No code outside the family's file compares its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, ClassVar

import torch

from accel_state.labels import DistributedType

__all__ = ("DeviceFamily",)


class DeviceFamily(ABC):
    """One kind of device.

    The defaults answer for a family that torch knows by `torch.get_device_module(name)`.
    """

    name: ClassVar[str]
    """Type of its torch devices, such as "cuda"."""

    label: ClassVar[DistributedType]
    """What users read as `distributed_type` when several processes work on it without another strategy."""

    backend: ClassVar[str]
    """Name of the torch.distributed backend that moves its tensors."""

    timeout: ClassVar[timedelta] = timedelta(minutes=30)
    """How long a collective may take when nothing else was asked for."""

    priority: ClassVar[int] = 0
    """Of the families that are present, the one with the highest priority is taken."""

    rng_key: ClassVar[str | None] = None
    """Key of its generators in a checkpoint's random states; None when the CPU generator is all there is."""

    rng_name: ClassVar[str | None] = None
    """Name by which `rng_types` asks for its generators, such as "cuda"."""

    pins_memory: ClassVar[bool] = False
    """Whether copies from pinned host memory are quicker."""

    @abstractmethod
    def present(self) -> bool:
        """Whether a device of this family can be used now; must not initialise a driver's context."""

    def count(self) -> int:
        """Number of devices of this family that this process can see."""
        return int(self.module.device_count())

    @property
    def module(self) -> Any:
        """The torch module of this family, such as `torch.cuda`."""
        return torch.get_device_module(self.name)

    def device(self, local_rank: int) -> torch.device:
        """The device of the process with this local rank, made the current one."""
        chosen = torch.device(self.name, local_rank % max(self.count(), 1))
        self.module.set_device(chosen)
        return chosen

    def seed(self, seed: int) -> None:
        """Seed the generators of all devices of the family."""
        self.module.manual_seed_all(seed)

    def rng_state(self) -> Any:
        """State of the generators of all devices, as it goes into a checkpoint."""
        return self.module.get_rng_state_all()

    def set_rng_state(self, state: Any) -> None:
        """Restore what `rng_state` returned."""
        self.module.set_rng_state_all(state)

    def current_rng_state(self) -> torch.Tensor:
        """State of the generator of the current device, for synchronising it between processes."""
        state: torch.Tensor = self.module.get_rng_state()
        return state

    def set_current_rng_state(self, state: torch.Tensor) -> None:
        """Set the state of the generator of the current device."""
        self.module.set_rng_state(state)

    def empty_cache(self) -> None:
        """Give memory that is held but unused back to the device."""
        self.module.empty_cache()

    def synchronize(self) -> None:
        """Wait until the current device has finished what it was given."""
        self.module.synchronize()

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether forward passes can autocast to `dtype` on this family."""
        return dtype in (torch.float16, torch.bfloat16)

    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler:
        """A gradient scaler for fp16 training on this family."""
        return torch.amp.GradScaler(self.name, **options)

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device ran out of memory, so that a smaller batch may fit."""
        return isinstance(error, torch.OutOfMemoryError)
