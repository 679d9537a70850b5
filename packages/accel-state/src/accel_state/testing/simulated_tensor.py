"""The tensors of the simulated device: each holds a CPU tensor, on which every operation runs.

Like a real device it has its own memory with a limit, its own generators, and refuses operations that mix its tensors
with those of the CPU.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from accel_state.errors import NotOffered

__all__ = ("MODULE", "NAME", "DeviceModule", "SimulatedTensor", "run")

NAME: Final = "simulated"
"""Type of the device."""

_CROSSING: Final = frozenset({"aten::copy_", "aten::_copy_from", "aten::_to_copy", "aten::index", "aten::index_put_"})
"""Operations that a device allows between its own tensors and those of the CPU."""


class _Memory:
    """The memory of one device: how much its tensors hold, and the most that they held."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = self.peak = 0

    def take(self, size: int) -> None:
        if self.used + size > self.limit:
            raise torch.OutOfMemoryError(f"{NAME} out of memory. Tried to allocate {size} bytes.")
        self.used += size
        self.peak = max(self.peak, self.used)


class _Allocation:
    """A piece of memory, given back when the last tensor that looks at it is gone."""

    def __init__(self, memory: _Memory, size: int) -> None:
        memory.take(size)
        weakref.finalize(self, self._give_back, memory, size)

    @staticmethod
    def _give_back(memory: _Memory, size: int) -> None:
        memory.used -= size


class DeviceModule:
    """What torch reaches as `torch.simulated`."""

    def __init__(self) -> None:
        self.index = 0
        self.memories: list[_Memory] = []
        self.generators: list[torch.Generator] = []
        self.allocations: weakref.WeakValueDictionary[int, _Allocation] = weakref.WeakValueDictionary()

    def plug_in(self, devices: int, memory: int) -> None:
        """Make devices available, each with so many bytes of memory; none takes them away."""
        self.index = 0
        self.memories = [_Memory(memory) for _ in range(devices)]
        self.generators = [torch.Generator() for _ in range(devices)]

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return bool(self.memories)

    def device_count(self) -> int:
        return len(self.memories)

    def current_device(self) -> int:
        return self.index

    def set_device(self, device: torch.device | int) -> None:
        self.index = index_of(device)

    def _is_in_bad_fork(self) -> bool:
        return False

    def synchronize(self, device: torch.device | int | None = None) -> None:
        """Every operation has ended when its call returns."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def manual_seed(self, seed: int) -> None:
        self.generators[self.index].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.generators:
            generator.manual_seed(seed)

    def get_rng_state(self, device: torch.device | int | str | None = None) -> torch.Tensor:
        return self.generators[index_of(device)].get_state()

    def set_rng_state(self, state: torch.Tensor, device: torch.device | int | str | None = None) -> None:
        self.generators[index_of(device)].set_state(state)

    def mem_get_info(self, device: torch.device | int | None = None) -> tuple[int, int]:
        memory = self.memories[index_of(device)]
        return memory.limit - memory.used, memory.limit

    def memory_allocated(self, device: torch.device | int | None = None) -> int:
        return self.memories[index_of(device)].used

    def max_memory_allocated(self, device: torch.device | int | None = None) -> int:
        return self.memories[index_of(device)].peak

    def reset_peak_memory_stats(self, device: torch.device | int | None = None) -> None:
        memory = self.memories[index_of(device)]
        memory.peak = memory.used


MODULE: Final = DeviceModule()


def index_of(device: torch.device | int | str | None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return MODULE.index if index is None else index


class SimulatedTensor(torch.Tensor):
    """A tensor of the simulated device.

    Args:
        raw: the CPU tensor that holds its values.
        index: the device it is on.
    """

    raw: torch.Tensor
    allocation: _Allocation

    @staticmethod
    def __new__(cls, raw: torch.Tensor, index: int) -> SimulatedTensor:
        tensor: SimulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, index),
        )
        tensor.raw = raw
        tensor.allocation = _allocation(raw, index)
        return tensor

    def __repr__(self, **options: Any) -> str:  # type: ignore[override] # torch declares one keyword of it
        return f"{self.raw!r} on {self.device}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the CPU tensor it holds, from which it is copied back when it is loaded into a model."""
        raw: Any = self.raw
        return raw.__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch declares it without the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, args, kwargs or {})


def _allocation(raw: torch.Tensor, index: int) -> _Allocation:
    """The piece of memory a tensor looks at; views look at that of their base."""
    if index >= MODULE.device_count():
        raise RuntimeError(f"There is no device {NAME}:{index}; there are {MODULE.device_count()}.")
    storage = raw.untyped_storage()
    known = MODULE.allocations.get(storage.data_ptr())
    if known is None:
        known = _Allocation(MODULE.memories[index], storage.nbytes())
        MODULE.allocations[storage.data_ptr()] = known
    return known


def run(operation: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the CPU tensors behind simulated ones, and wrap what comes out."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ours = {id(tensor.raw): tensor for tensor in tensors if isinstance(tensor, SimulatedTensor)}
    _check_places(operation, tensors)
    index = next((tensor.device.index for tensor in ours.values()), MODULE.index)
    wraps = bool(ours)
    if kwargs.get("device") is not None:
        wraps = torch.device(kwargs["device"]).type == NAME
        index = index_of(kwargs["device"]) if wraps else index
        kwargs = {**kwargs, "device": torch.device("cpu")} if wraps else kwargs

    args, kwargs = pytree.tree_map_only(SimulatedTensor, lambda tensor: tensor.raw, (args, kwargs))
    with _drawing_from(index) if torch.Tag.nondeterministic_seeded in operation.tags else contextlib.nullcontext():
        result = operation(*args, **kwargs)
    _check_sizes(ours.values())
    if not wraps:
        return result

    def wrap(raw: torch.Tensor) -> torch.Tensor:
        known = ours.get(id(raw))
        return SimulatedTensor(raw, index) if known is None else known

    return pytree.tree_map_only(torch.Tensor, wrap, result)


def _check_places(operation: Any, tensors: list[torch.Tensor]) -> None:
    """Refuse what a device refuses: tensors of several places; a CPU tensor of one element counts as a number."""
    places = {str(tensor.device) for tensor in tensors if tensor.dim() > 0}
    if len(places) > 1 and operation._schema.name not in _CROSSING:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(places))}! ({operation._schema.name})"
        )


def _check_sizes(tensors: Any) -> None:
    for tensor in tensors:
        if tensor.raw.shape != tensor.shape:
            raise NotOffered(
                "A tensor of the simulated device was resized in place.",
                "The simulated device cannot follow that.",
                "Make a new tensor.",
            )


@contextmanager
def _drawing_from(index: int) -> Iterator[None]:
    """Let random operations on the CPU draw from the generator of a simulated device."""
    host, generator = torch.get_rng_state(), MODULE.generators[index]
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(host)
