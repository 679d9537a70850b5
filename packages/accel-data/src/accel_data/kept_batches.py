"""Batches of an epoch that are kept in host memory, so that a loop can be taken back and receive them again.

Reading them again would need an order and samples that repeat, which streams, workers and random augmentation lack.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping
from typing import Any

from torch import Tensor

from accel_data.padding import PaddedBatch
from accel_data.sharding import Padding
from accel_ops.tree import recursively_apply

__all__ = ("KeptBatches",)


class KeptBatches(Iterator[PaddedBatch]):
    """The batches of an iterator, with a mark to which it can be taken back.

    A loader reads one batch ahead: the loop has the batch before the last one that this has yielded.

    Args:
        batches: the iterator.
        padded: the padding of batches that do not contain it, by number.
        stays: whether a tensor is not copied to another device. A copy of it is yielded, because the loop may change it
            in place.
        moves_on: called with the number of each batch before the loop receives it, counted from 0.

    Attributes:
        number: number of the batch that the loop has; -1 before the first.
        read: batches that were read so far, those that are left out included.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        padded: MutableMapping[int, Padding],
        stays: Callable[[Tensor], bool],
        moves_on: Callable[[int], None],
    ) -> None:
        self._batches, self._padded, self._stays, self._moves_on = batches, padded, stays, moves_on
        # Those since the mark, with their numbers, and how many of them were yielded.
        self._kept: list[tuple[int, PaddedBatch]] = []
        self._yielded = self.read = 0
        self._failure: Exception | None = None
        self._ahead: int | None = None
        self.number, self._marked = -1, -1

    def __next__(self) -> PaddedBatch:
        if self._ahead is not None:
            self.number, self._ahead = self._ahead, None
            self._moves_on(self.number)
        if self._yielded == len(self._kept):
            self._kept.append((self.read, self._next_read()))
            self.read += 1
        self._ahead, item = self._kept[self._yielded]
        self._yielded += 1
        return PaddedBatch(recursively_apply(self._own, item.batch), item.padding, item.base)

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.clone() if self._stays(tensor) else tensor

    def _next_read(self) -> PaddedBatch:
        if self._failure is not None:
            raise self._failure
        try:
            item = next(self._batches)
        except Exception as error:
            # The iterator has ended; the error is raised again if the loop is taken back.
            self._failure = error.with_traceback(None)
            raise
        padding = self._padded.pop(self.read, None)
        if type(item) is not PaddedBatch:
            return PaddedBatch(item, padding)
        item.padding = padding if item.padding is None else item.padding
        return item

    @property
    def ends_early(self) -> bool:
        """Whether the loop has the last batch that it gets, and others that were read after it are left out."""
        return self.number + 1 < self.read

    def mark(self) -> None:
        """Let the loop be taken back to here: to where it has just finished with the batch that it has."""
        self._kept = self._kept[self._yielded - (self._ahead is not None) :]
        self._yielded = int(self._ahead is not None)
        self._marked = self.number

    def take_back(self, left_out: Collection[int]) -> int:
        """Take the loop back to the mark, and return the number of the batch that it had there.

        Args:
            left_out: numbers of batches that it does not get again.
        """
        self._kept = [(number, item) for number, item in self._kept if number not in left_out]
        self._yielded, self._ahead, self.number = 0, None, self._marked
        return self._marked
