"""The interface of a device family: everything the rest of the project asks of a kind of device.

A package that brings a family subclasses `DeviceFamily` (or `TorchFamily`, where torch knows the device by a module of
its own) and offers the class through the entry-point group `accel.devices`. No code outside the family's file compares
its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

import torch

from accel_state.errors import NotOffered, NotReady
from accel_state.labels import DistributedType
from accel_state.topology import Topology

__all__ = ("DeviceFamily",)


class DeviceFamily(ABC):
    """One kind of device.

    The defaults answer for a family that torch knows by `torch.get_device_module(name)`.
    """

    name: str
    """Type of its torch devices, such as "cuda"."""

    label: DistributedType
    """What users read as `distributed_type` when several processes work on it without another strategy."""

    backend: str
    """Name of the torch.distributed backend that moves its tensors."""

    timeout: timedelta = timedelta(minutes=30)
    """How long a collective may take when nothing else was asked for."""

    priority: int = 0
    """Of the families that are present, the one with the highest priority is taken."""

    rng_key: str | None = None
    """Key of its generators in a checkpoint's random states; None when the CPU generator is all there is."""

    rng_name: str | None = None
    """Name by which `rng_types` asks for its generators, such as "cuda"."""

    pins_memory: bool = False
    """Whether copies from pinned host memory are quicker."""

    ring_attention: bool = False
    """Whether torch's context parallelism knows the attention kernels of this family."""

    visible_variable: str | None = None
    """Variable that limits which of its devices a process sees, such as "CUDA_VISIBLE_DEVICES"."""

    transport: str = "accel_state.transport.torch_dist:TorchDistTransport"
    """"module:class" of the collectives between several processes; imported where there are several."""

    @abstractmethod
    def present(self) -> bool:
        """Whether a device of this family can be used now; must not open the device, so that a fork stays possible."""

    @property
    def module(self) -> Any:
        """The torch module of this family, such as `torch.cuda`."""
        return torch.get_device_module(self.name)

    def count(self) -> int:
        """Number of devices of this family that this process can see."""
        return int(self.module.device_count())

    def device(self, local_rank: int) -> torch.device:
        """The device of the process with this local rank, made the current one."""
        chosen = torch.device(self.name, local_rank % max(self.count(), 1))
        self.module.set_device(chosen)
        return chosen

    def distributed_backend(self) -> str:
        """Name of the torch.distributed backend for several processes.

        Raises:
            NotOffered: none moves the tensors of this family.
        """
        if self.backend:
            return self.backend
        raise NotOffered(
            f"Several processes on the device family {self.name!r} were asked for.",
            "No torch.distributed backend is known that moves its tensors.",
            "Start one process, work on the CPU with --cpu, or name a backend in InitProcessGroupKwargs.",
        )

    def placed(self, topology: Topology) -> Topology:
        """The place of this process, given the one that its launcher told; called once, before the device is taken.

        Raises:
            NotOffered: the runtime of the devices cannot work in that place.
        """
        return topology

    def settle(self, topology: Topology) -> None:  # noqa: B027 - most families have nothing to adapt
        """Adapt the process to its place on the node; called once, when its state is made."""

    def check_fork(self) -> None:
        """Refuse a process that was forked after its parent had opened the device.

        Raises:
            NotReady: the device cannot be used in this process.
        """
        forked_badly = getattr(self.module, "_is_in_bad_fork", None)
        if forked_badly is not None and forked_badly():
            raise NotReady(
                f"Work on the device family {self.name!r} was asked for in a forked process.",
                "The process it was forked from had used the device already, and its driver does not survive a fork.",
                "Restart the notebook or script, and touch the device only in the function that is launched.",
            )

    def seed(self, seed: int) -> None:
        """Seed the generators of all devices of the family."""
        self.module.manual_seed_all(seed)

    def rng_state(self) -> Any:
        """State of the generators of all devices, as it goes into a checkpoint."""
        return [self.module.get_rng_state(index) for index in range(self.count())]

    def set_rng_state(self, state: Any) -> None:
        """Restore what `rng_state` returned."""
        for index, one in enumerate(state):
            self.module.set_rng_state(one, index)

    def current_rng_state(self) -> torch.Tensor:
        """State of the generator of the current device, for synchronising it between processes."""
        state: torch.Tensor = self.module.get_rng_state()
        return state

    def set_current_rng_state(self, state: torch.Tensor) -> None:
        """Set the state of the generator of the current device."""
        self.module.set_rng_state(state)

    def synchronize(self) -> None:
        """Wait until the current device has finished what it was given."""
        self.module.synchronize()

    def empty_cache(self) -> None:
        """Give memory that is held but unused back to the device."""
        self.module.empty_cache()

    def free_memory(self, index: int | None = None) -> int:
        """Bytes that can be had on a device, by default the current one."""
        return int(self._memory("mem_get_info", index)[0])

    def total_memory(self, index: int | None = None) -> int:
        """Bytes that a device has, by default the current one."""
        return int(self._memory("mem_get_info", index)[1])

    def used_memory(self, index: int | None = None) -> int:
        """Bytes that tensors of this process hold on a device, by default the current one."""
        return int(self._memory("memory_allocated", index))

    def peak_memory(self, index: int | None = None) -> int:
        """The most that `used_memory` was since the start or since `reset_peak_memory`."""
        return int(self._memory("max_memory_allocated", index))

    def reset_peak_memory(self, index: int | None = None) -> None:
        """Let `peak_memory` count from now."""
        self._memory("reset_peak_memory_stats", index)

    def _memory(self, question: str, index: int | None) -> Any:
        """Ask the torch module of the family.

        Raises:
            NotOffered: the module has no such question.
        """
        asked = getattr(self.module, question, None)
        if asked is None:
            raise NotOffered(
                f"The memory of a device of the family {self.name!r} was asked for.",
                f"Its torch module offers no {question}().",
                "Ask the vendor's own tool.",
            )
        return asked() if index is None else asked(torch.device(self.name, index))

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device ran out of memory, so that a smaller batch may fit."""
        spoken = isinstance(error, RuntimeError) and " out of memory" in str(error).lower()
        return isinstance(error, torch.OutOfMemoryError) or spoken

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether forward passes can autocast to `dtype` on this family."""
        return dtype in (torch.float16, torch.bfloat16)

    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler:
        """A gradient scaler for fp16 training on this family."""
        return torch.amp.GradScaler(self.name, **options)

    def numa_node(self, index: int) -> int | None:
        """The group of processors that is nearest to a device, or None when that is not known."""
        return None
