"""A simulated device in CPU memory, for tests of code for devices on a machine that has none.

It registers itself with torch under torch's name for third-party devices (PrivateUse1), so tensors have
`device='simulated:0'`, and no other module of this project contains code for it. Each of its tensors wraps a CPU
tensor, on which every operation runs. Like a real device it has a memory limit, its own generators, autocast and
collectives, and refuses operations that mix its tensors with CPU tensors. It needs torch 2.10 or newer and a machine
without a GPU, and must be imported before the first backward pass of a process.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

from accel_state.errors import NotOffered

__all__ = ("BACKEND", "NAME", "POSSIBLE", "DeviceModule", "SimulatedGroup", "SimulatedTensor", "simulated_device")

NAME: Final = "simulated"
"""Type of the device."""

_CROSSING_OPERATIONS: Final = frozenset(
    {"aten::copy_", "aten::_copy_from", "aten::_to_copy", "aten::index", "aten::index_put_"}
)
"""Operations that a device allows between its own tensors and those of the CPU."""


class _Memory:
    """The memory of one device: the bytes that its tensors use, and their maximum."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = self.peak = 0

    def take(self, size: int) -> None:
        if self.used + size > self.limit:
            raise torch.OutOfMemoryError(f"{NAME} out of memory. Tried to allocate {size} bytes.")
        self.used += size
        self.peak = max(self.peak, self.used)


class _Allocation:
    """A piece of memory, freed when the last tensor that uses it is deleted."""

    def __init__(self, memory: _Memory, size: int) -> None:
        memory.take(size)
        weakref.finalize(self, self._free, memory, size)

    @staticmethod
    def _free(memory: _Memory, size: int) -> None:
        memory.used -= size


class OnlyStream:
    """The stream of the device."""

    def synchronize(self) -> None:
        """Does nothing: every operation has ended when its call returns."""


_ONLY_STREAM: Final = OnlyStream()


class DeviceModule:
    """The module `torch.simulated`."""

    def __init__(self) -> None:
        self.index = 0
        self.memories: list[_Memory] = []
        self.generators: list[torch.Generator] = []
        self.allocations: weakref.WeakValueDictionary[int, _Allocation] = weakref.WeakValueDictionary()

    def plug_in(self, devices: int, memory: int) -> None:
        """Make devices available, each with `memory` bytes; 0 devices removes them."""
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
        """Does nothing: every operation has ended when its call returns."""

    def current_stream(self, device: torch.device | int | None = None) -> OnlyStream:
        return _ONLY_STREAM

    def stream(self, stream: OnlyStream) -> contextlib.AbstractContextManager[None]:
        """A context in which operations are queued on this stream."""
        return contextlib.nullcontext()

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

    def get_device_name(self, device: torch.device | int | str | None = None) -> str:
        return f"Simulated device {index_of(device)}"

    def get_device_properties(self, device: torch.device | int | str | None = None) -> SimpleNamespace:
        return SimpleNamespace(name=self.get_device_name(device), total_memory=self.memories[index_of(device)].limit)

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
        index: index of its device.
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
        """Pickle the wrapped CPU tensor, which is copied to the device when it is loaded into a model."""
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
    """The piece of memory that a tensor uses; views use that of their base."""
    if index >= MODULE.device_count():
        raise RuntimeError(f"There is no device {NAME}:{index}; there are {MODULE.device_count()}.")
    storage = raw.untyped_storage()
    allocation = MODULE.allocations.get(storage.data_ptr())
    if allocation is None:
        allocation = _Allocation(MODULE.memories[index], storage.nbytes())
        MODULE.allocations[storage.data_ptr()] = allocation
    return allocation


def run(operation: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the wrapped CPU tensors, and wrap the results."""
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
        run: Any = _COLLECTIVES.get(operation._schema.name, operation)
        result = run(*args, **kwargs)
    _check_sizes(ours.values())
    if not wraps:
        return result

    def wrap(raw: torch.Tensor) -> torch.Tensor:
        wrapped = ours.get(id(raw))
        return SimulatedTensor(raw, index) if wrapped is None else wrapped

    return pytree.tree_map_only(torch.Tensor, wrap, result)


def _check_places(operation: Any, tensors: list[torch.Tensor]) -> None:
    """Refuse tensors on different devices, as a real device does; a CPU tensor with one element counts as a number."""
    places = {str(tensor.device) for tensor in tensors if tensor.dim() > 0}
    if len(places) > 1 and operation._schema.name not in _CROSSING_OPERATIONS:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(places))}! ({operation._schema.name})"
        )


def _check_sizes(tensors: Any) -> None:
    for tensor in tensors:
        if tensor.raw.shape != tensor.shape:
            raise NotOffered(
                "A tensor of the simulated device was resized in place.",
                "The simulated device does not support that.",
                "Create a new tensor.",
            )


@contextmanager
def _drawing_from(index: int) -> Iterator[None]:
    """Make random operations on the CPU draw from the generator of a simulated device."""
    host, generator = torch.get_rng_state(), MODULE.generators[index]
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(host)


BACKEND: Final = "simulated_ccl"
"""Name of the backend."""

_SAME_COLLECTIVES: Final = (
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)
_RENAMED_COLLECTIVES: Final = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}
"""Operation names of torch 2.13 and later, with gloo's older names for them."""


class SimulatedGroup(dist.ProcessGroup):
    """A process group that passes the wrapped CPU tensors to gloo.

    Args:
        store: the store of the rendezvous.
        rank: index of this process.
        size: number of processes.
        timeout: how long a collective may take.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # the declared signature is that of another overload
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    @property
    def group_name(self) -> Any:
        """The name of the group in torch.distributed."""
        name: Any = dist.distributed_c10d._world.pg_names[self]
        return name

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it moves; torch chooses by them where it puts pickled objects."""
        return [torch.device(NAME)]

    def getBackendName(self) -> str:  # noqa: N802 - the name torch calls
        return BACKEND


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor in a simulated one; other tensors are refused, as NCCL refuses tensors on other devices."""
    if not isinstance(tensor, SimulatedTensor):
        raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
    return tensor.raw


def _over_gloo(name: str) -> Callable[..., Any]:
    def call(self: SimulatedGroup, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, _raw, (args, kwargs))
        # torch records only the collectives of groups that are written in C++.
        with torch.profiler.record_function(f"c10d::{name}"):
            return getattr(self.gloo, name)(*args, **kwargs)

    return call


for _name in _SAME_COLLECTIVES:
    setattr(SimulatedGroup, _name, _over_gloo(_name))
for _name, _older in _RENAMED_COLLECTIVES.items():
    setattr(SimulatedGroup, _name, _over_gloo(_older))


def _gathered(shard: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    full = shard.new_empty((size * shard.shape[0], *shard.shape[1:]))
    _gloo_of(group)._allgather_base(full, shard).wait()
    return full


def _reduced(tensor: torch.Tensor, operation: str, group: Any) -> torch.Tensor:
    total, options = tensor.clone(), dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, operation.upper())
    _gloo_of(group).allreduce([total], options).wait()
    return total


def _gloo_of(group: Any) -> Any:
    groups: Any = dist.distributed_c10d
    return (groups._resolve_process_group(group) if isinstance(group, str) else group).gloo


_COLLECTIVES: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "_c10d_functional::all_gather_into_tensor": _gathered,
    "_c10d_functional::all_reduce": _reduced,
    "_c10d_functional::wait_tensor": lambda tensor: tensor,
    "_c10d_functional::_wrap_tensor_autograd": lambda tensor: tensor.view(tensor.shape),
}
"""The collectives of DTensors, on the wrapped CPU tensors."""

_FACTORY_OPERATIONS: Final = (
    "empty.memory_format",
    "empty_strided",
    "arange",
    "arange.start",
    "arange.start_step",
    "randperm",
    "randperm.generator",
    "linspace",
    "eye",
    "eye.m",
)
"""Operations that create a tensor and that torch does not compose from others without resizing."""

_AUTOCAST_OPERATIONS: Final = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "conv1d", "conv2d", "conv3d")
"""Operations that run in the lower precision under autocast."""


def _make(operation: Any) -> Callable[..., Any]:
    """The kernel of an operation that creates a tensor on the device."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return run(operation, args, {**kwargs, "device": kwargs.get("device") or torch.device(NAME, MODULE.index)})

    return make


def _copy_from(source: torch.Tensor, destination: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return run(torch.ops.aten.copy_.default, (destination, source), {})  # type: ignore[no-any-return]


def _cast(operation: Any) -> Callable[..., Any]:
    """The autocasting kernel of an operation."""
    keys: Any = torch._C.DispatchKey
    autocasting = torch._C.DispatchKeySet(keys.AutocastPrivateUse1)

    def lower(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.get_autocast_dtype(NAME)) if tensor.is_floating_point() else tensor

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(autocasting):
            args, kwargs = pytree.tree_map_only(torch.Tensor, lower, (args, kwargs))
            return operation(*args, **kwargs)

    return cast


def _register() -> tuple[Any, ...]:
    """Register the device with torch; keep the returned objects alive, because the registration ends with them."""
    library: Any = torch.library.Library
    backend_registration._setup_privateuseone_for_python_backend(NAME, MODULE)
    kernels, fallback = library("aten", "IMPL"), library("_", "IMPL")
    for name in _FACTORY_OPERATIONS:
        packet, _, overload = name.partition(".")
        kernels.impl(name, _make(getattr(getattr(torch.ops.aten, packet), overload or "default")), "PrivateUse1")
    kernels.impl("_copy_from", _copy_from, "PrivateUse1")
    for name in _AUTOCAST_OPERATIONS:
        kernels.impl(name, _cast(getattr(torch.ops.aten, name)), "AutocastPrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    dist.Backend.register_backend(BACKEND, SimulatedGroup, devices=[NAME])
    return kernels, fallback


POSSIBLE: Final = (
    hasattr(backend_registration, "_setup_privateuseone_for_python_backend") and not torch.cuda.is_available()
)
"""Whether this torch version supports a device that is written in Python, on this machine.

If there is one, torch uses it as the accelerator of the process in preference to a GPU: autograd would then order work
on its streams and not on CUDA's.
"""

_kept: Final = _register() if POSSIBLE else ()
"""Registered on import: torch's autograd counts the devices at the first backward pass of a process."""


@contextmanager
def simulated_device(devices: int = 1, memory: int = 64 * 2**20) -> Iterator[None]:
    """Make the device available inside the block; afterwards it is still registered, but the device count is 0.

    Args:
        devices: number of devices; torch's autograd works only on the first.
        memory: memory of each device in bytes.

    Raises:
        NotOffered: this torch version does not support a device that is written in Python, or there is a GPU.

    Example:
        >>> with simulated_device():
        ...     print(torch.ones(2, device="simulated").add(1).device)
        simulated:0
    """
    if not POSSIBLE:
        raise NotOffered(
            "Cannot create the simulated device.",
            f"torch {torch.__version__} does not support a device that is written in Python, or there is a GPU, and "
            "autograd would ignore its streams.",
            "Install torch 2.10 or newer, and hide GPUs with CUDA_VISIBLE_DEVICES=''.",
        )
    MODULE.plug_in(devices, memory)
    try:
        yield
    finally:
        MODULE.plug_in(0, 0)
