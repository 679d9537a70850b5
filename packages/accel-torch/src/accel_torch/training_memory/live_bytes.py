"""Counts the bytes of live tensors by purpose after each operation of torch.

No memory is allocated: the tensors are those of `torch._subclasses.FakeTensorMode`, with shapes and storages but
without values.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ("LiveBytes", "MemoryKind")


class MemoryKind(str, Enum):
    """The purpose of a tensor."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer states"
    ACTIVATIONS = "activations"
    GATHERED = "gathered parameters"
    COMMUNICATION = "communication buffers"


_COLLECTIVES: Final = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_FSDP: Final = "fsdp"


class _Storage:
    """One live storage."""

    __slots__ = ("bytes", "kind", "reference")

    reference: weakref.ref[torch.UntypedStorage]

    def __init__(self, kind: MemoryKind) -> None:
        self.kind, self.bytes = kind, 0


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live storages, and records the peak.

    A storage counts once, however many tensors view it. FSDP frees gathered parameters by resizing their storages to
    zero, which is not an operation, so sizes are read again at each operation.

    Args:
        mode: the mode whose fake tensors are counted.
        on_host: kinds that are stored on the host, and not counted in the device's peak.
        granularity: bytes to which the allocator rounds up.
        workspace: temporary bytes of an operation besides its results, by name, arguments and results.

    Example:
        >>> with mode, LiveBytes(mode) as live:  # doctest: +SKIP
        ...     torch.zeros(4)
        >>> live.peak  # doctest: +SKIP
        16
    """

    def __init__(
        self,
        mode: FakeTensorMode,
        on_host: Iterable[MemoryKind] = (),
        granularity: int = 1,
        workspace: Callable[[str, list[Tensor], list[Tensor]], int] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: dict[MemoryKind, int] = dict.fromkeys(MemoryKind, 0)
        """Live bytes, by kind."""
        self.peak = 0
        """The largest number of live bytes on the device."""
        self.at_peak: Mapping[MemoryKind, int] = dict(self.now)
        """Live bytes at the device's peak, by kind."""
        self.host_peak = 0
        """The largest number of live bytes on the host."""
        self.default = MemoryKind.ACTIVATIONS
        """The kind of the next allocations."""
        self.after_collective: Callable[[], None] | None = None
        """Called after each collective."""
        self.moved = 0
        """Bytes that collectives read and wrote."""
        self._on_host = frozenset(on_host)
        self._mode, self._granularity, self._workspace = mode, granularity, workspace
        self._storages: dict[int, _Storage] = {}
        self._resizable: dict[int, _Storage] = {}

    def track(self, tensor: Tensor, kind: MemoryKind) -> None:
        """Count a tensor under a kind from now on."""
        self._add(tensor, kind)
        self._compare()

    def reset_peak(self) -> None:
        """Reset the peaks."""
        self.peak = self.host_peak = 0
        self._compare()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self.after_collective = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The operation on the local tensors is dispatched here separately.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self._read_again()
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if given and not any(isinstance(leaf, FakeTensor) for leaf in given):
            # For example the ranks of a mesh, whose values sharding code reads.
            with unset_fake_temporarily():
                return function(*args, **(kwargs or {}))
        made = function(*args, **(kwargs or {}))
        name = function.name() if hasattr(function, "name") else str(function)
        space = name.partition("::")[0]
        results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        if space in _COLLECTIVES:
            self._collective(name, given, results)
        elif space == _FSDP:
            self._sharding(name, given, results)
        else:
            for tensor in (*given, *results):
                self._add(tensor)
        extra = self._workspace(name, given, results) if self._workspace is not None else 0
        if extra:
            kind = MemoryKind.COMMUNICATION if space in _COLLECTIVES else MemoryKind.ACTIVATIONS
            self.now[kind] += extra
            self._compare()
            self.now[kind] -= extra
        self._compare()
        return made

    def _collective(self, name: str, given: list[Tensor], results: list[Tensor]) -> None:
        for tensor in (*given, *results):
            held = self._add(tensor)
            if held is not None and held.kind is MemoryKind.ACTIVATIONS and not name.startswith("_c10d"):
                self._put(held, MemoryKind.COMMUNICATION)
        if not name.endswith("wait_tensor"):
            # An all-reduce reads and writes its tensors; the outputs of other collectives are among their arguments.
            passes = 2 if "all_reduce" in name or "allreduce" in name else 1
            self.moved += passes * sum(tensor.nbytes for tensor in given)
        if self.after_collective is not None:
            self.after_collective()

    def _sharding(self, name: str, given: list[Tensor], results: list[Tensor]) -> None:
        """An operation with which FSDP copies shards to buffers, and buffers to full parameters."""
        whole = name.startswith("fsdp::split_with_sizes_copy")
        for position, tensor in enumerate((*given, *results)):
            held = self._add(tensor)
            if held is None:
                continue
            if held.kind is MemoryKind.ACTIVATIONS:
                self._put(held, MemoryKind.GATHERED if whole and position else MemoryKind.COMMUNICATION)
            if held.kind in (MemoryKind.GATHERED, MemoryKind.COMMUNICATION):
                self._resizable[id(held)] = held

    def _add(self, tensor: Tensor, kind: MemoryKind | None = None) -> _Storage | None:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if tensor.device.type == "meta" or not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self._mode:
            # DTensor infers shapes with fake tensors of its own.
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        held = self._storages.get(key)
        if held is None or held.reference() is None:
            held = _Storage(kind or self.default)
            held.reference = weakref.ref(storage, functools.partial(self._free, key, held))
            self._storages[key] = held
        elif kind is not None and held.kind is not kind:
            self._put(held, kind)
        self._resize(held, storage.nbytes())
        return held

    def _put(self, held: _Storage, kind: MemoryKind) -> None:
        self.now[held.kind] -= held.bytes
        held.kind = kind
        self.now[kind] += held.bytes

    def _resize(self, held: _Storage, size: int) -> None:
        size = -(-size // self._granularity) * self._granularity
        if size != held.bytes:
            self.now[held.kind] += size - held.bytes
            held.bytes = size

    def _free(self, key: int, held: _Storage, _: object) -> None:
        self._resize(held, 0)
        self._resizable.pop(id(held), None)
        if self._storages.get(key) is held:
            del self._storages[key]

    def _read_again(self) -> None:
        for held in list(self._resizable.values()):
            storage = held.reference()
            if storage is not None:
                self._resize(held, storage.nbytes())
                if not held.bytes:
                    # Before its next use it is an argument of an operation, which counts it again.
                    self._resizable.pop(id(held), None)

    def _compare(self) -> None:
        host = sum(self.now[kind] for kind in self._on_host)
        device = sum(self.now.values()) - host
        self.host_peak = max(self.host_peak, host)
        if device >= self.peak:
            self.peak, self.at_peak = device, dict(self.now)
