"""Slices and concatenates batches by samples, and serialises a batch to a message of bytes.

A message has an announcement of fixed size, then the tensors, then the other objects, pickled. Each message announces
the length of the next, so receivers always know the size. The structure of a batch is sent once, and again only when it
changes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from accel_ops.objects import dumps, loads
from accel_ops.packing import PackedLayout
from accel_ops.tree import honor_type, leaves_with_paths, map_children, recursively_apply
from accel_state.errors import DataError

__all__ = (
    "BATCH",
    "END",
    "FAILURE",
    "Announcement",
    "BatchSpec",
    "Message",
    "PackedBatch",
    "cut",
    "join",
    "pack",
    "samples_in",
)

# ------------------------------------------------------------------ samples of a batch


def samples_in(batch: Any) -> int | None:
    """Number of samples in a batch: the first dimension of its first tensor with dimensions, else the length of a list.

    None if it has neither.
    """
    for _, leaf in leaves_with_paths(batch):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    return len(batch) if isinstance(batch, list) else None


def cut(batch: Any, start: int, stop: int) -> Any:
    """Samples `start` to `stop` of a batch.

    Tensors with one entry per sample in the first dimension, and lists with one object per sample, are sliced. Other
    leaves are unchanged.
    """

    def samples(leaf: Any) -> Any:
        chosen = leaf[start:stop]
        return chosen if isinstance(leaf, torch.Tensor) else honor_type(leaf, chosen)

    return _with_sample_leaves(batch, samples_in(batch), samples)


def join(batches: Sequence[Any]) -> Any:
    """Concatenate batches of one structure.

    Raises:
        DataError: their structures or the shapes of their samples differ.
    """
    if len(batches) == 1:
        return batches[0]
    sizes = [samples_in(batch) for batch in batches]
    columns = [_sample_leaves(batch, size) for batch, size in zip(batches, sizes, strict=True)]
    if len({len(found) for found in columns}) != 1:
        raise _unequal("They have different structures.")
    joined = iter([_joined(column) for column in zip(*columns, strict=True)])
    return _with_sample_leaves(batches[0], sizes[0], lambda _: next(joined))


def _sample_leaves(batch: Any, size: int | None) -> list[Any]:
    found: list[Any] = []

    def keep(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    _with_sample_leaves(batch, size, keep)
    return found


def _with_sample_leaves(batch: Any, size: int | None, replace: Callable[[Any], Any]) -> Any:
    """The batch with each leaf that has one entry per sample replaced."""
    if isinstance(batch, torch.Tensor):
        return replace(batch) if batch.ndim and batch.shape[0] == size else batch
    if _lists_samples(batch, size):
        return replace(batch)
    return map_children(batch, lambda item: _with_sample_leaves(item, size, replace))


def _joined(column: Sequence[Any]) -> Any:
    if not isinstance(column[0], torch.Tensor):
        return honor_type(column[0], _chained(column))
    try:
        return torch.cat(list(column))
    except (RuntimeError, TypeError) as error:
        raise _unequal(f"Their tensors cannot be concatenated: {error}") from error


def _chained(column: Sequence[Any]) -> Iterator[Any]:
    for leaf in column:
        yield from leaf


def _lists_samples(value: Any, size: int | None) -> bool:
    if type(value) not in (list, tuple) or len(value) != size:
        return False
    return not any(isinstance(item, torch.Tensor) or _is_container(item) for item in value)


def _is_container(value: Any) -> bool:
    leaf: list[Any] = []
    map_children(value, lambda item: item, leaf.append)
    return not leaf


def _unequal(obstacle: str) -> DataError:
    return DataError(
        "Cannot dispatch a batch: the main process cannot concatenate batches and split them between processes.",
        obstacle,
        "Let the collate function return batches of one structure and sample shape, use split_batches=True, or let "
        "every process read its own batches (dispatch_batches=False).",
    )


# ------------------------------------------------------------------ messages

END: Final = 0
BATCH: Final = 1
FAILURE: Final = 2

_WORDS: Final = struct.Struct("<8q")
ANNOUNCED: Final = _WORDS.size
"""Bytes of the announcement at the beginning of a message."""


@dataclass(frozen=True)
class Announcement:
    """Describes the next message, and the number of real samples in this step.

    Args:
        kind: END, BATCH or FAILURE.
        nbytes: length of the next message.
        new_spec: whether a new `BatchSpec` is sent before it.
        total: real samples of this step; -1 without padding.
        batch_size: samples of each process in this step.
        single: whether the step has unbatched samples.
        objects: length of the pickled objects in this message.
    """

    kind: int
    nbytes: int = 0
    new_spec: bool = False
    total: int = -1
    batch_size: int = 0
    single: bool = False
    objects: int = 0

    def to_bytes(self) -> bytes:
        """The first bytes of a message."""
        words = (self.kind, self.nbytes, self.new_spec, self.total, self.batch_size, self.single, self.objects, 0)
        return _WORDS.pack(*words)

    @classmethod
    def of(cls, data: bytes | memoryview) -> Announcement:
        """The announcement in the first bytes of a message."""
        kind, nbytes, new_spec, total, batch_size, single, objects, _ = _WORDS.unpack(data)
        return cls(kind, nbytes, bool(new_spec), total, batch_size, bool(single), objects)


class _Leaf:
    """Marks a leaf of a `BatchSpec`: a tensor or another object."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: bool) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Leaf) and other.tensor == self.tensor

    __hash__ = None  # type: ignore[assignment]


_TENSOR: Final = _Leaf(True)
_OBJECT: Final = _Leaf(False)


@dataclass
class BatchSpec:
    """The structure of a batch, without its contents.

    Args:
        tree: the pytree, with marks instead of tensors and other objects.
        tensors: shape and dtype of each tensor.
    """

    tree: Any
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]
    _packing: PackedLayout | None = field(default=None, compare=False, repr=False)

    @property
    def packing(self) -> PackedLayout:
        """The layout of the tensors in a message."""
        if self._packing is None:
            self._packing = PackedLayout(self.tensors)
        return self._packing

    def __getstate__(self) -> tuple[Any, Any]:
        return self.tree, self.tensors

    def __setstate__(self, state: tuple[Any, Any]) -> None:
        self.tree, self.tensors = state
        self._packing = None


@dataclass
class PackedBatch:
    """The batch of one process, ready to be written to a message.

    Args:
        spec: its structure.
        tensors: its tensors.
        objects: its other leaves, pickled; empty without any.
    """

    spec: BatchSpec
    tensors: list[torch.Tensor]
    objects: bytes = b""

    @property
    def nbytes(self) -> int:
        """Length of its message."""
        return ANNOUNCED + self.spec.packing.nbytes + len(self.objects)


def pack(batch: Any) -> PackedBatch:
    """Separate a batch into structure, tensors and other objects."""
    tensors: list[torch.Tensor] = []
    objects: list[Any] = []
    spec = BatchSpec(_separated(batch, tensors, objects), ())
    spec.tensors = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
    return PackedBatch(spec, tensors, dumps(objects) if objects else b"")


def _separated(value: Any, tensors: list[torch.Tensor], objects: list[Any]) -> Any:
    """The structure of a value; its tensors and its other leaves are appended."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return _TENSOR
    leaf: list[Any] = []
    structure = map_children(value, lambda item: _separated(item, tensors, objects), leaf.append)
    if not leaf:
        return structure
    objects.append(value)
    return _OBJECT


class Message:
    """A buffer for messages, with views for the announcement and the tensors of each.

    Args:
        data: uint8 of shape (bytes,), at least as long as its messages.
    """

    __slots__ = ("_data", "_head", "_parts", "_spec")

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._head = memoryview(data[:ANNOUNCED].numpy().data) if data.is_cpu else None
        self._spec: BatchSpec | None = None
        self._parts: list[torch.Tensor] = []

    def announcement(self) -> Announcement:
        """The announcement at the beginning."""
        return Announcement.of(bytes(self._data[:ANNOUNCED].tolist()) if self._head is None else self._head)

    def write(self, announcement: bytes, batch: PackedBatch) -> None:
        """Write an announcement and the contents of a batch to a buffer on the CPU."""
        assert self._head is not None
        self._head[:] = announcement
        batch.spec.packing.write(batch.tensors, self._tensors_of(batch.spec))
        if batch.objects:
            at = ANNOUNCED + batch.spec.packing.nbytes
            objects = torch.frombuffer(bytearray(batch.objects), dtype=torch.uint8)
            self._data[at : at + len(batch.objects)] = objects

    def unpack(self, spec: BatchSpec, objects: int) -> Any:
        """The batch in the message; its tensors do not share the buffer's memory.

        Args:
            spec: its structure.
            objects: length of the pickled objects.
        """
        tensors = iter(spec.packing.split(self._tensors_of(spec)))
        at = ANNOUNCED + spec.packing.nbytes
        others = iter(loads(self._data[at : at + objects].cpu().numpy().tobytes()) if objects else ())
        return recursively_apply(
            lambda leaf: next(tensors) if leaf.tensor else next(others),
            spec.tree,
            test_type=lambda value: isinstance(value, _Leaf),
        )

    def _tensors_of(self, spec: BatchSpec) -> list[torch.Tensor]:
        if self._spec is not spec:
            self._spec = spec
            self._parts = spec.packing.parts(self._data[ANNOUNCED : ANNOUNCED + spec.packing.nbytes])
        return self._parts
