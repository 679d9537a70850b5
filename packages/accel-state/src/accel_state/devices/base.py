"""The interface of a device family: everything that depends on the type of the device.

A package that provides a family subclasses `DeviceFamily` and registers the class in the entry-point group
`accel.devices`. No other code compares names of families.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from accel_state.devices.specs import DeviceSpec
from accel_state.errors import NotOffered, NotReady
from accel_state.library import stack_level
from accel_state.plugins import contained
from accel_state.settings.environ import publish
from accel_state.settings.installed import importable
from accel_state.topology import Topology

__all__ = (
    "DeviceFamily",
    "HostCopies",
)


class DeviceFamily:
    """One type of device.

    The defaults use the torch module of the family, `torch.get_device_module(name)`.

    Attributes:
        spec: the data of the family; a subclass sets it.
    """

    spec: DeviceSpec

    @property
    def name(self) -> str:
        """Type of its torch devices, such as "cuda"."""
        return self.spec.name

    def present(self) -> bool:
        """Whether this machine has a device of this family; must not initialise it, because that prevents forks."""
        if self.spec.vendor is not None and not _vendor_loaded(self.spec.vendor, self.name):
            return False
        module = getattr(torch, self.name, None)
        if module is None:
            return False
        with _environment(self.spec.probing):
            return bool(module.is_available())

    @property
    def module(self) -> Any:
        """The torch module of this family, such as `torch.cuda`."""
        return torch.get_device_module(self.name)

    def count(self) -> int:
        """Number of devices of this family that this process sees."""
        return int(self.module.device_count())

    def device(self, local_rank: int) -> torch.device:
        """The device of the process with this local rank; makes it the current device."""
        return self.device_at(local_rank % max(self.count(), 1))

    def device_at(self, index: int) -> torch.device:
        """The device with this index; makes it the current device."""
        chosen = torch.device(self.name, index)
        self.module.set_device(chosen)
        return chosen

    def exclusive_device(self, device: torch.device, backend: str) -> str | None:
        """The identity of a device that only one process can use; None if several can, or if that is unknown.

        Called before the processes connect. If two have the same identity, the run prints a warning.

        Args:
            device: the device of this process.
            backend: name of the torch.distributed backend, such as "nccl" or "cpu:gloo,cuda:nccl".
        """
        backends = {part.rpartition(":")[2] for part in backend.lower().split(",")}
        if not self.spec.exclusive_with or self.spec.exclusive_with not in backends:
            return None
        identity = getattr(self.module.get_device_properties(device), "uuid", None)
        return None if identity is None else f"{self.name} device {identity}"

    def distributed_backend(self) -> str:
        """Name of the torch.distributed backend for several processes.

        Raises:
            NotOffered: torch.distributed has no backend for the tensors of this family.
        """
        if self.spec.collectives is not None:
            importlib.import_module(self.spec.collectives)
        if self.spec.backend:
            return self.spec.backend
        raise NotOffered(
            f"Cannot run several processes on {self.name} devices.",
            "torch.distributed has no known backend for their tensors.",
            "Start one process, use the CPU with --cpu, or name a backend in InitProcessGroupKwargs.",
        )

    def runtime_topology(self, topology: Topology) -> Topology:
        """The topology of this process, for a device runtime that assigns ranks itself.

        Called once, before `device`.

        Args:
            topology: what the launcher set in the environment.

        Raises:
            NotOffered: the runtime does not support this topology.
        """
        return topology

    def configure(self, topology: Topology) -> None:
        """Configure the process, such as its number of threads; called once, after `device`."""

    def check_fork(self) -> None:
        """Raise in a process that was forked after its parent had initialised the device.

        Raises:
            NotReady: this process cannot use the device.
        """
        forked_badly = getattr(self.module, "_is_in_bad_fork", None)
        if forked_badly is not None and forked_badly():
            raise NotReady(
                f"Cannot use {self.name} devices in a forked process.",
                "The parent process had initialised the device, and its driver does not survive a fork.",
                "Restart the notebook or script, and use the device only in the function that is launched.",
            )

    def seed(self, seed: int) -> None:
        """Seed the generators of all devices of the family."""
        self.module.manual_seed_all(seed)

    def rng_state(self) -> Any:
        """State of the generators of all devices, for a checkpoint."""
        return [self.module.get_rng_state(index) for index in range(self.count())]

    def set_rng_state(self, state: Any) -> None:
        """Restore what `rng_state` returned."""
        for index, state_of_device in enumerate(state):
            self.module.set_rng_state(state_of_device, index)

    def current_rng_state(self) -> torch.Tensor:
        """State of the generator of the current device, to synchronise it between processes."""
        state: torch.Tensor = self.module.get_rng_state()
        return state

    def set_current_rng_state(self, state: torch.Tensor) -> None:
        """Set the state of the generator of the current device."""
        self.module.set_rng_state(state)

    def synchronize(self) -> None:
        """Wait until the current device has finished all queued work."""
        self.module.synchronize()

    def host_copies(self, device: torch.device) -> HostCopies | None:
        """Copies from pinned host memory beside what the device computes; None if it does not gain from them."""
        return HostCopies(device) if self.spec.pins_memory and hasattr(self.module, "Stream") else None

    def empty_cache(self) -> None:
        """Free the memory that the allocator caches. Without such a cache, do nothing."""
        release = getattr(self.module, "empty_cache", None)
        if release is not None:
            release()

    def free_memory(self, index: int | None = None) -> int:
        """Free bytes of a device, by default the current one."""
        return int(self._memory("mem_get_info", index)[0])

    def total_memory(self, index: int | None = None) -> int:
        """Bytes of memory of a device, by default the current one."""
        return int(self._memory("mem_get_info", index)[1])

    def used_memory(self, index: int | None = None) -> int:
        """Bytes that the tensors of this process occupy on a device, by default the current one."""
        return int(self._memory("memory_allocated", index))

    def memory_beside_host(self, index: int | None = None) -> int | None:
        """The device memory that the status of a run shows: `used_memory` of a device that has its own memory.

        None if the device uses the host's memory, or does not count its own.
        """
        try:
            return self.used_memory(index)
        except NotOffered:
            return None

    def peak_memory(self, index: int | None = None) -> int:
        """The maximum of `used_memory` since the start or since `reset_peak_memory`."""
        return int(self._memory("max_memory_allocated", index))

    def reset_peak_memory(self, index: int | None = None) -> None:
        """Restart the maximum of `peak_memory`."""
        self._memory("reset_peak_memory_stats", index)

    def _memory(self, name: str, index: int | None) -> Any:
        """Call a function of the torch module of the family.

        Raises:
            NotOffered: the module has no such function.
        """
        function = getattr(self.module, name, None)
        if function is None:
            raise NotOffered(
                f"Cannot read the memory of a device of the family {self.name!r}.",
                f"Its torch module has no {name}().",
                "Use the vendor's tool.",
            )
        return function() if index is None else function(torch.device(self.name, index))

    def out_of_memory(self, error: BaseException) -> bool:
        """Whether an error means that the device ran out of memory, so that a smaller batch may fit."""
        message = str(error).lower() if isinstance(error, RuntimeError) else ""
        return isinstance(error, torch.OutOfMemoryError) or " out of memory" in message

    def supports(self, dtype: torch.dtype) -> bool:
        """Whether forward passes on this family can autocast to `dtype`."""
        if not torch.amp.autocast_mode.is_autocast_available(self.name):
            return False
        supported = getattr(self.module, "get_amp_supported_dtype", None)
        return dtype in (supported() if supported is not None else (torch.float16, torch.bfloat16))

    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler:
        """A gradient scaler for fp16 training on this family."""
        return torch.amp.GradScaler(self.name, **options)

    def description(self, index: int) -> str:
        """Name, memory and what else distinguishes a device, for people; empty if nothing is known.

        It may initialise the device.
        """
        name = getattr(self.module, "get_device_name", None)
        properties = getattr(self.module, "get_device_properties", None)
        # Not `total_memory`, which would allocate memory on the device.
        memory = None if properties is None else getattr(properties(index), "total_memory", None)
        parts = ("" if name is None else name(index), "" if memory is None else f"{memory / 2**30:.1f} GiB")
        return ", ".join(filter(None, parts))

    def software(self) -> Mapping[str, str]:
        """Versions of what drives the devices of this family, by name, such as the driver's."""
        return {}

    def numa_node(self, index: int) -> int | None:
        """The NUMA node of a device, or None when it is not known."""
        return None


@functools.cache
def _vendor_loaded(vendor: str, name: str) -> bool:
    """Import a vendor's module if it is installed; warn once if it is broken."""
    try:
        if not importable(vendor):
            return False
        with contained():
            importlib.import_module(vendor)
    except Exception as error:
        warnings.warn(
            f"{vendor} is installed but could not be imported ({error!r}), so {name} devices are ignored.",
            stacklevel=stack_level(),
        )
        return False
    return True


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ[name] for name in variables if name in os.environ}
    publish(variables)
    try:
        yield
    finally:
        publish(before, remove=variables.keys() - before.keys())


# ---------------------------------------------------------------------- copies beside computation


class HostCopies:
    """Copies from pinned host memory to one device, on a stream of their own.

    The device orders them with what it computes by events; the host waits for nothing.

    Args:
        device: the device; its torch module must have streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy of a CPU tensor in pinned memory."""
        return tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a CPU tensor is in pinned memory."""
        return tensor.is_pinned()

    def pinned_size(self, tensor: Tensor) -> int:
        """Bytes that a pinned copy takes: torch's allocator rounds up to a power of two."""
        return 1 << max(tensor.nbytes - 1, 0).bit_length()

    def start(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Begin to copy a CPU tensor to the device, which converts it; memory that is not pinned is copied first."""
        pinned = tensor if self.is_pinned(tensor) else self.pin(tensor)
        with self._module.stream(self._stream):
            # torch's allocator keeps pinned memory for as long as a copy from it takes.
            return pinned.to(self.device, non_blocking=True).to(dtype)

    def mark(self) -> Any:
        """The end of the copies that were started until now, for `use_after`."""
        return self._stream.record_event()

    def use_after(self, mark: Any) -> None:
        """Make the calling thread's stream wait for copies before what it is given next."""
        self._module.current_stream(self.device).wait_event(mark)

    def start_after_use(self) -> None:
        """Make copies that are started later wait for what the calling thread's stream was given until now.

        Memory of earlier copies may be freed after that: the next ones reuse it in the order of the stream.
        """
        self._stream.wait_event(self._module.current_stream(self.device).record_event())

    def keep_until_used(self, tensor: Tensor) -> None:
        """Reuse the memory of a copy, whenever it is freed, only after the work of the calling thread's stream."""
        tensor.record_stream(self._module.current_stream(self.device))
