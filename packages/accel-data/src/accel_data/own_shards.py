"""An equal number of steps for processes that read separate streams of unknown length.

At every step each process sends its number of samples for the next step, and how many of them are not padding of its
sampler. A process whose stream has ended repeats its last batch, marked as padding, until the streams of all processes
have ended.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from accel_data.batches import cut, join, samples_in
from accel_data.order import RNGState
from accel_data.padding import PaddedBatch
from accel_data.progress import Position
from accel_data.sharding import Padding, StepCounts, batching_of
from accel_data.source import LocalSource, Source, first_batches
from accel_data.stateful import is_finished
from accel_ops.collectives import PendingCall, async_all_gather_bytes
from accel_ops.objects import broadcast_object_list
from accel_state.errors import DataError

__all__ = ("OwnShardSource",)

_SHARD_ENDED: Final = object()
_FAILED_SIZE: Final = -1
"""The size that a process sends after an error of reading."""

_SIZES_STRUCT: Final = struct.Struct("<qq")
"""The number of samples in the next batch, and how many of them are real."""


class OwnShardSource(Source):
    """Batches from a loader that already has this process's shard of the data.

    Args:
        local: reads this process's batches.
        processes: the number of processes with such a shard.
        even: make all processes take the same number of steps, with batches of equal size in each step.
        drop_last: end as soon as the stream of one process ends.
        ranks: by shard of the data, a process that reads it; empty if this process cannot communicate with the others.
        real: samples of this process's epoch without the padding of its sampler; None if it adds none.
        keeps_sizes: whether batches keep their sizes; a process whose stream has ended repeats its last batch, which
            counts nothing.
        index: index of this process's shard.
    """

    def __init__(
        self,
        local: LocalSource,
        processes: int,
        even: bool,
        drop_last: bool,
        ranks: Sequence[int],
        real: int | None = None,
        keeps_sizes: bool = False,
        index: int = 0,
    ) -> None:
        self.local = local
        self.even = even
        self.drop_last = drop_last
        self.ranks = ranks
        self.real = real
        self.keeps_sizes = keeps_sizes
        self.processes, self.index = processes, index
        self.step_size = None if local.step_size is None else local.step_size * processes
        # The reader of the last opened epoch.
        self._reader: _Reader | None = None

    @property
    def may_be_empty(self) -> bool:
        return not self.even or self.drop_last

    def open(self, at: Position | None = None, replay: RNGState | None = None) -> Iterator[Any]:
        local = self.local
        size, own = local.step_size, None
        if at is not None:
            own = dataclasses.replace(at, samples=None if size is None else at.steps * size)
        self._reader = None
        if not self.even or self.processes == 1 or not self.ranks:
            return local.open(own, replay)
        steps = local.skipped()[0] if at is None else at.steps
        state = None if at is None or at.base is None or not is_finished(at.base) else at.base
        # A stream with a state of its own begins there from now on.
        beginning = local if at is None or at.base is None else local.apart()
        batches = local.open(own, replay) if state is None else iter(())
        real = None if self.real is None or size is None else self.real - steps * size
        end_state = local.base_state if state is None else lambda: state
        self._reader = _Reader(batches, self.ranks, batching_of(local.base) is None, real, end_state)

        def earlier() -> Any:
            """The last batch before the steps of this epoch, of a stream that has ended."""
            return first_batches(beginning, steps, replay or local.last_rng.state)[0][-1]

        if self.keeps_sizes:
            return _with_stand_ins(self._reader, self.drop_last, self.index)
        return _in_step(self._reader, self.drop_last, earlier if steps else None)

    def base_state(self) -> dict[str, Any] | None:
        return self.local.base_state() if self._reader is None else self._reader.state

    def skipping(self, steps: int) -> OwnShardSource:
        return self.over(self.local.skipping(steps))

    def skipped(self) -> tuple[int, int | None]:
        steps, samples = self.local.skipped()
        return steps, None if samples is None else samples * self.processes

    def with_sample_ids(self) -> OwnShardSource:
        return self.over(self.local.with_sample_ids(own=True))


def _in_step(reader: _Reader, drop_last: bool, earlier: Callable[[], Any] | None) -> Iterator[PaddedBatch]:
    """The batches of one process, as many as on the process with most batches.

    Args:
        reader: reads batches and exchanges their sizes.
        drop_last: as many as on the process with fewest batches instead.
        earlier: returns the batch before the first one, if the epoch continues in its middle.

    Raises:
        DataError: a process has no samples, or another process could not read.
    """
    reader.read()
    last: Any = _SHARD_ENDED
    try:
        while True:
            batch, state, sizes, real = reader.answers()
            if not any(sizes) or (drop_last and not all(sizes)):
                return
            if last is _SHARD_ENDED and earlier is None:
                _check_all_have(sizes, reader.ranks)
            if batch is not _SHARD_ENDED:
                last = batch
            elif last is _SHARD_ENDED and earlier is not None:
                last = earlier()
            reader.read()
            yield PaddedBatch(*_filled(batch, last, max(sizes), real, reader.single), state)
            del batch
    finally:
        reader.answers(fails=False)


def _with_stand_ins(reader: _Reader, drop_last: bool, index: int) -> Iterator[PaddedBatch]:
    """The batches of one process in their own sizes; without data its last one, or another process's, as a stand-in.

    Args:
        reader: reads batches and exchanges their sizes.
        drop_last: end as soon as one process has no batch.
        index: index of this process's shard of the data.

    Raises:
        DataError: another process could not read.
    """
    reader.read()
    last: Any = _SHARD_ENDED
    try:
        while True:
            batch, state, sizes, real = reader.answers()
            if not any(real) or (drop_last and not all(real)):
                return
            if last is _SHARD_ENDED and not all(sizes):
                sender = next(rank for rank, size in zip(reader.ranks, sizes, strict=True) if size)
                last = broadcast_object_list([batch], sender)[0]
            if batch is not _SHARD_ENDED:
                last = batch if real[index] in (0, sizes[index]) else cut(batch, 0, real[index])
            del batch
            reader.read()
            yield PaddedBatch(last, StepCounts.each(real), state)
    finally:
        reader.answers(fails=False)


class _Reader:
    """Prefetches one batch and exchanges its size with the other processes.

    Args:
        batches: this process's batches.
        ranks: by shard of the data, the process whose size is used.
        single: the batches are unbatched samples.
        real: samples left before the padding of the process's sampler; None if it adds none.
        end_state: returns torchdata's state at the end of the stream.

    Attributes:
        state: torchdata's state after the batch that was read last.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        ranks: Sequence[int],
        single: bool,
        real: int | None,
        end_state: Callable[[], dict[str, Any] | None],
    ) -> None:
        self.batches = batches
        self.ranks = ranks
        self.single = single
        self.real = real
        self.end_state = end_state
        self.state: dict[str, Any] | None = None
        self._pending: PendingCall | None = None
        self._answers: list[tuple[int, int]] = []
        self._batch: Any = None
        self._failure: Exception | None = None

    def read(self) -> None:
        """Read the next batch and start to send its size."""
        try:
            item = next(self.batches, _SHARD_ENDED)
            if item is _SHARD_ENDED:
                self._batch, self.state = item, self.end_state()
            else:
                self._batch, self.state = (item.batch, item.base) if type(item) is PaddedBatch else (item, None)
            counts = item.padding if type(item) is PaddedBatch else None
            size = counts.total if isinstance(counts, StepCounts) else self._size()
            mine = _SIZES_STRUCT.pack(size, self._count(size))
        except Exception as error:
            self._failure, mine = error, _SIZES_STRUCT.pack(_FAILED_SIZE, 0)
        self._pending = async_all_gather_bytes(mine, "DataLoader.__next__")

    def _size(self) -> int:
        if self._batch is _SHARD_ENDED:
            return 0
        return 1 if self.single else samples_in(self._batch) or 0

    def _count(self, size: int) -> int:
        """The number of real samples in the next batch, which has this size."""
        if self.real is None:
            return size
        real = min(size, self.real)
        self.real -= real
        return real

    def answers(self, fails: bool = True) -> tuple[Any, dict[str, Any] | None, list[int], list[int]]:
        """The batch, or `_SHARD_ENDED`; the state after it; its size in each shard of the data; the real samples."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._answers = [_SIZES_STRUCT.unpack(row) for row in pending.wait()]
        sizes, real = [size for size, _ in self._answers], [real for _, real in self._answers]
        if fails and self._failure is not None:
            raise self._failure
        if fails and _FAILED_SIZE in sizes:
            raise DataError(
                "Cannot get the next batch of streams that the processes read separately.",
                f"Process {sizes.index(_FAILED_SIZE)} could not read its stream.",
                f"See the error of process {sizes.index(_FAILED_SIZE)}.",
            )
        return self._batch, self.state, [sizes[rank] for rank in self.ranks], [real[rank] for rank in self.ranks]


def _check_all_have(sizes: list[int], ranks: Sequence[int]) -> None:
    if not all(sizes):
        without = [rank for rank, size in zip(ranks, sizes, strict=True) if not size]
        raise DataError(
            "Cannot begin an epoch of streams that the processes read separately.",
            f"The stream of process {without[0]} has no samples, so it cannot take part in a step.",
            "Divide the stream into shards that all have samples, use fewer processes, or set even_batches=False.",
        )


def _filled(batch: Any, last: Any, wanted: int, real: list[int], single: bool) -> tuple[Any, Padding | None]:
    """The batch, or samples of the last one instead of it, with its padding."""
    if all(count == wanted for count in real):
        return batch, None
    if single:
        return last, Padding.by_process([None if count else 0 for count in real], 0)
    size = 0 if batch is _SHARD_ENDED else samples_in(batch) or 0
    if size < wanted:
        filler = cut(join([last] * (wanted // (samples_in(last) or 1) + 1)), 0, wanted - size)
        batch = join([batch, filler]) if size else filler
    return batch, Padding.by_process(real, wanted)
