"""Many small tensors in one run of bytes, and back.

Tensors of one dtype lie side by side, so that packing is one `cat` per dtype and unpacking one copy per dtype in which
every tensor gets storage of its own. (Views of one buffer would let one small tensor keep all of it alive.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

__all__ = ("ALIGNMENT", "Packing", "Segment", "as_bytes")

ALIGNMENT: Final = 16
"""Bytes; the size of complex128, so that every dtype can be read where a segment begins."""


@dataclass(frozen=True)
class Segment:
    """The tensors of one dtype in a packed buffer.

    Args:
        dtype: theirs.
        members: their positions in the list that is packed.
        sizes: number of elements of each.
        start: first byte.
        stop: byte after the last, without the padding that follows.
    """

    dtype: torch.dtype
    members: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int

    def of(self, buffer: torch.Tensor) -> torch.Tensor:
        """This segment of a packed buffer, uint8 of shape (..., nbytes), as (..., sum(sizes)) of its dtype."""
        return buffer[..., self.start : self.stop].view(self.dtype)

    def split(self, values: torch.Tensor, tensors: list[Any]) -> None:
        """Put copies of the parts of `values`, of shape (..., sum(sizes)), at the members' places in `tensors`."""
        parts: Any = torch.split_with_sizes_copy(values, self.sizes, values.dim() - 1)  # type: ignore[func-returns-value]
        for position, part in zip(self.members, parts, strict=True):
            tensors[position] = part


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as uint8 of shape (nbytes,) that shares its memory."""
    return tensor.view(-1).view(torch.uint8)


class Packing:
    """The layout of a packed buffer for tensors of given numbers of elements and dtypes."""

    __slots__ = ("count", "nbytes", "segments")

    def __init__(self, tensors: Iterable[tuple[int, torch.dtype]]) -> None:
        by_dtype: dict[torch.dtype, list[tuple[int, int]]] = {}
        self.count = 0
        for position, (numel, dtype) in enumerate(tensors):
            by_dtype.setdefault(dtype, []).append((position, numel))
            self.count += 1
        segments, start = [], 0
        for dtype, members in by_dtype.items():
            sizes = tuple(numel for _, numel in members)
            stop = start + sum(sizes) * dtype.itemsize
            segments.append(Segment(dtype, tuple(position for position, _ in members), sizes, start, stop))
            start = -(-stop // ALIGNMENT) * ALIGNMENT
        self.segments = tuple(segments)
        # Rows of no length could not be read as another dtype.
        self.nbytes = max(start, ALIGNMENT) if segments else 0
        """Length of the buffer, a multiple of `ALIGNMENT`."""

    def write(self, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        """Copy the tensors into `buffer`, uint8 of shape (nbytes,)."""
        for segment in self.segments:
            parts = [tensors[position].reshape(-1) for position in segment.members]
            torch.cat(parts, out=segment.of(buffer))

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in `buffer`, uint8 of shape (nbytes,); each of shape (numel,) and sharing its memory."""
        tensors: list[Any] = [None] * self.count
        for segment in self.segments:
            parts = torch.split(segment.of(buffer), list(segment.sizes))
            for position, part in zip(segment.members, parts, strict=True):
                tensors[position] = part
        return tensors

    def read(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in `buffer`, uint8 of shape (rows, nbytes); each is a new tensor of shape (rows, numel)."""
        tensors: list[Any] = [None] * self.count
        for segment in self.segments:
            segment.split(segment.of(buffer), tensors)
        return tensors
