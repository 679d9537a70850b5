"""The message in which one process sends another its part of a step: what comes next, then tensors, then other objects.

All sizes are known before a message travels: each one announces the length of the next. The structure of a part is sent
once and again only when it changes.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from accel_ops.packing import PackedLayout
from accel_ops.tree import map_children, recursively_apply

__all__ = ("BATCH", "END", "FAILURE", "Announcement", "Form", "Parcel", "take_apart")

END: Final = 0
BATCH: Final = 1
FAILURE: Final = 2

_WORDS: Final = 8
HEADER: Final = 8 * _WORDS
"""Bytes of the announcement in front of a message."""


@dataclass(frozen=True)
class Announcement:
    """What the next message will be, and how much of this one's step is real.

    Args:
        kind: END, BATCH or FAILURE.
        nbytes: length of the next message.
        new_form: whether its structure has to be sent before it.
        total: real samples of this step; -1 when nothing was added.
        part: samples of each process in this step.
        single: whether the step has samples that are not batched.
        objects: length of the pickled objects in this message.
    """

    kind: int
    nbytes: int = 0
    new_form: bool = False
    total: int = -1
    part: int = 0
    single: bool = False
    objects: int = 0

    def header(self) -> torch.Tensor:
        """The first bytes of a message."""
        words = (self.kind, self.nbytes, self.new_form, self.total, self.part, self.single, self.objects, 0)
        return torch.tensor(words, dtype=torch.int64).view(torch.uint8)

    @classmethod
    def read(cls, header: torch.Tensor) -> Announcement:
        """The inverse of `header`."""
        kind, nbytes, new_form, total, part, single, objects, _ = header[:HEADER].view(torch.int64).tolist()
        return cls(kind, nbytes, bool(new_form), total, part, bool(single), objects)


class _Slot:
    """Stands in a structure where a tensor or another object was."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: bool) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Slot) and other.tensor == self.tensor

    __hash__ = None  # type: ignore[assignment]


_TENSOR: Final = _Slot(True)
_OBJECT: Final = _Slot(False)


@dataclass
class Form:
    """Structure of a part: everything about it but the contents.

    Args:
        skeleton: the containers, with slots for tensors and other objects.
        tensors: shape and dtype of each tensor.
    """

    skeleton: Any
    tensors: tuple[tuple[torch.Size, torch.dtype], ...]
    _packing: PackedLayout | None = field(default=None, compare=False, repr=False)

    @property
    def packing(self) -> PackedLayout:
        """How its tensors lie in a message."""
        if self._packing is None:
            self._packing = PackedLayout(self.tensors)
        return self._packing

    def __getstate__(self) -> tuple[Any, Any]:
        return self.skeleton, self.tensors

    def __setstate__(self, state: tuple[Any, Any]) -> None:
        self.skeleton, self.tensors = state
        self._packing = None


@dataclass
class Parcel:
    """The part of one process, taken apart.

    Args:
        form: its structure.
        tensors: its tensors.
        objects: its other leaves, pickled; empty when there are none.
    """

    form: Form
    tensors: list[torch.Tensor]
    objects: bytes = b""

    @property
    def nbytes(self) -> int:
        """Length of its message."""
        return HEADER + self.form.packing.nbytes + len(self.objects)

    def write(self, header: torch.Tensor, message: torch.Tensor) -> None:
        """Put the announcement and the contents into a message."""
        packing = self.form.packing
        message[:HEADER] = header
        packing.write(self.tensors, message[HEADER : HEADER + packing.nbytes])
        if self.objects:
            at = HEADER + packing.nbytes
            message[at : at + len(self.objects)] = torch.frombuffer(bytearray(self.objects), dtype=torch.uint8)


def take_apart(part: Any) -> Parcel:
    """Tensors, other objects and structure of a part."""
    tensors: list[torch.Tensor] = []
    objects: list[Any] = []

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach())
            return _TENSOR
        leaf: list[Any] = []
        rebuilt = map_children(value, walk, leaf.append)
        if not leaf:
            return rebuilt
        objects.append(value)
        return _OBJECT

    form = Form(walk(part), ())
    form.tensors = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
    return Parcel(form, tensors, pickle.dumps(objects) if objects else b"")


def put_together(form: Form, message: torch.Tensor, objects: int) -> Any:
    """A part out of its message; every tensor has memory of its own.

    Args:
        form: its structure.
        message: as it came.
        objects: length of the pickled objects.
    """
    packing = form.packing
    tensors = iter(packing.split(message[HEADER : HEADER + packing.nbytes]))
    at = HEADER + packing.nbytes
    others = iter(pickle.loads(message[at : at + objects].cpu().numpy().tobytes()) if objects else ())
    return recursively_apply(
        lambda slot: next(tensors) if slot.tensor else next(others),
        form.skeleton,
        test_type=lambda value: isinstance(value, _Slot),
    )
