"""Packs many small tensors into one buffer of bytes, and unpacks them.

Tensors of one dtype are adjacent, so that packing is one `cat` per dtype and unpacking one copy per dtype. Each
unpacked tensor has its own storage: with views of one buffer, one small tensor would keep the whole buffer alive.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from accel_state.protocol.header import ALIGNMENT

__all__ = ("PackedLayout", "Segment", "as_bytes", "contiguous", "gathered_shape")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as uint8 of shape (nbytes,) that shares its memory."""
    return tensor.view(-1).view(torch.uint8)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The detached elements of a tensor in contiguous memory; the tensor's own memory if it is already contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def gathered_shape(shape: Sequence[int], rows: int) -> tuple[int, ...]:
    """Shape of `rows` tensors joined along the first dimension; tensors without dimensions become one element each."""
    return (rows * shape[0], *shape[1:]) if shape else (rows,)


class Segment:
    """The tensors of one dtype in a packed buffer.

    Args:
        dtype: dtype of the tensors.
        members: their positions in the packed list.
        shapes: their shapes.
        start: first byte of the segment.

    Attributes:
        stop: byte after the last one, without padding.
    """

    __slots__ = ("_common", "_joined", "_lengths", "_same", "_sizes", "dtype", "members", "shapes", "start", "stop")

    def __init__(
        self,
        dtype: torch.dtype,
        members: tuple[int, ...],
        shapes: tuple[tuple[int, ...], ...],
        start: int,
        rows: int,
    ) -> None:
        self.dtype = dtype
        self.members = members
        self.shapes = shapes
        self.start = start
        self._sizes = [math.prod(shape) for shape in shapes]
        self.stop = start + sum(self._sizes) * dtype.itemsize
        self._joined = [gathered_shape(shape, rows) for shape in shapes]
        # Tensors of equal shapes are joined and split without a reshape of each, which is faster.
        self._common = _common(shapes)
        self._lengths = [] if self._common is None else [shape[0] for shape in shapes]
        self._same = len(set(shapes)) == 1 and self._sizes[0] > 0

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """This segment of a packed buffer, uint8 of shape (..., nbytes), as (..., elements) of its dtype."""
        return buffer[..., self.start : self.stop].view(self.dtype)

    def write(self, tensors: Sequence[torch.Tensor], values: torch.Tensor) -> None:
        """Copy the members' tensors into `values`, of shape (elements,)."""
        mine = [tensors[position] for position in self.members]
        if self._common is not None:
            torch.cat(mine, out=values.view(-1, *self._common))
        else:
            torch.cat([tensor.reshape(-1) for tensor in mine], out=values)

    def split(self, values: torch.Tensor, copy: bool = True) -> list[torch.Tensor]:
        """The members' tensors from `values`, of shape (elements,), as copies or as views."""
        split: Any = torch.split_with_sizes_copy if copy else torch.split_with_sizes
        if self._common is not None:
            return list(split(values.view(-1, *self._common), self._lengths))
        parts = split(values, self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def join(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The members' tensors from `rows`, of shape (rows, elements), as new tensors joined over the rows."""
        split: Any = torch.split_with_sizes_copy
        if self._same:
            shape, count = self._joined[0], len(self.members)
            by_member = rows.view(-1, count, self._sizes[0]).transpose(0, 1)
            return list(split(by_member.reshape(count * shape[0], *shape[1:]), [shape[0]] * count))
        parts = split(rows, self._sizes, 1)
        return [part.view(shape) for part, shape in zip(parts, self._joined, strict=True)]


class PackedLayout:
    """The layout of a packed buffer.

    Args:
        tensors: shape and dtype of each tensor.
        rows: number of buffers that `join` takes.
    """

    __slots__ = ("count", "nbytes", "segments")

    def __init__(self, tensors: Iterable[tuple[Sequence[int], torch.dtype]], rows: int = 1) -> None:
        by_dtype: dict[torch.dtype, list[tuple[int, tuple[int, ...]]]] = {}
        self.count = 0
        for position, (shape, dtype) in enumerate(tensors):
            by_dtype.setdefault(dtype, []).append((position, tuple(shape)))
            self.count += 1
        segments, start = [], 0
        for dtype, leaves in by_dtype.items():
            members, shapes = zip(*leaves, strict=True)
            segments.append(Segment(dtype, members, shapes, start, rows))
            start = -(-segments[-1].stop // ALIGNMENT) * ALIGNMENT
        self.segments = tuple(segments)
        # Empty rows could not be viewed as another dtype.
        self.nbytes = max(start, ALIGNMENT) if segments else 0
        """Length of the buffer, a multiple of `ALIGNMENT`."""

    def parts(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The segments of `buffer`, uint8 of shape (..., nbytes), as views of shape (..., elements), each of its dtype.

        They can be cached if the buffer is reused.
        """
        return [segment.of(buffer) for segment in self.segments]

    def write(self, tensors: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """Copy the tensors into the parts of a buffer of shape (nbytes,)."""
        for segment, values in zip(self.segments, parts, strict=True):
            segment.write(tensors, values)

    def split(self, parts: Sequence[torch.Tensor], copy: bool = True) -> list[torch.Tensor]:
        """The tensors in the parts of a buffer of shape (nbytes,), as copies or as views."""
        return self._in_order(segment.split(values, copy) for segment, values in zip(self.segments, parts, strict=True))

    def join(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors in the parts of a buffer of shape (rows, nbytes), each joined over the rows along dimension 0."""
        return self._in_order(segment.join(values) for segment, values in zip(self.segments, parts, strict=True))

    def _in_order(self, tensors_by_segment: Iterator[list[torch.Tensor]]) -> list[torch.Tensor]:
        if len(self.segments) == 1:
            return next(tensors_by_segment)
        tensors: list[Any] = [None] * self.count
        for segment, parts in zip(self.segments, tensors_by_segment, strict=True):
            for position, part in zip(segment.members, parts, strict=True):
                tensors[position] = part
        return tensors


def _common(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    if any(not shape for shape in shapes) or len({shape[1:] for shape in shapes}) > 1:
        return None
    common = shapes[0][1:]
    return None if 0 in common else common
