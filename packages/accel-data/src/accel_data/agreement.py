"""An equal number of steps for processes that read separate streams of unknown length.

At every step each process sends its number of samples for the next step, and how many of them are not padding of its
sampler. A process whose stream has ended repeats samples from the beginning, marked as padding, until the streams of
all processes have ended.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

from accel_data.batch_codec import cut, join, samples_in
from accel_data.order import RNGState
from accel_data.padding import PaddedBatch
from accel_data.progress import Position
from accel_data.sharding import Padding, batching_of
from accel_data.source import Source, WrappedSource, first_batches
from accel_data.stateful import is_finished
from accel_ops.pending import PendingCall, async_all_gather_bytes
from accel_state.errors import DataError

__all__ = ("AgreedSource", "in_step")

_OVER: Final = object()
_FAILED: Final = -1
"""The size that a process sends after an error of reading."""

_SIZES: Final = struct.Struct("<qq")
"""The number of samples in the next batch, and how many of them are real."""


class AgreedSource(WrappedSource):
    """Batches from a source that is already this process's shard.

    Args:
        inner: yields this process's batches.
        processes: the number of processes with such a source.
        even: make all processes take the same number of steps, with batches of equal size in each step.
        drop_last: end as soon as the stream of one process ends.
        ranks: by shard of the data, a process that reads it; empty if this process cannot communicate with the others.
        real: samples of this process's epoch without the padding of its sampler; None if it adds none.
    """

    def __init__(
        self,
        inner: Source,
        processes: int,
        even: bool,
        drop_last: bool,
        ranks: Sequence[int],
        real: int | None = None,
    ) -> None:
        super().__init__(inner)
        self.even = even
        self.drop_last = drop_last
        self.ranks = ranks
        self.real = real
        self._processes = processes
        # The reader of the last opened epoch.
        self._reader: _AgreeingReader | None = None

    @property
    def processes(self) -> int:
        """See `Source`."""
        return self._processes

    @property
    def step_size(self) -> int | None:
        """See `Source`."""
        size = self.inner.step_size
        return None if size is None else size * self.processes

    @property
    def counts_steps(self) -> bool:
        """True: the processes have no common order."""
        return True

    @property
    def pads(self) -> bool:
        """False: the processes agree on padding at each step."""
        return False

    @property
    def may_be_empty(self) -> bool:
        """See `Source`."""
        return not self.even or self.drop_last

    def length(self) -> int | None:
        """None: this process does not know the data of the others."""
        return None

    def remainder(self, start: int | None) -> int:
        """-1: this process does not know the data of the others."""
        return -1

    def shortage(self) -> str | None:
        """None: this process does not know the data of the others."""
        return None

    def steps(self, at: Position | None) -> int | None:
        """None: this process does not know the data of the others."""
        return None

    def open(self, at: Position | None = None, replay: RNGState | None = None) -> Iterator[Any]:
        """See `Source`."""
        inner = self.inner
        size, own = inner.step_size, None
        if at is not None:
            own = dataclasses.replace(at, samples=None if size is None else at.steps * size)
        self._reader = None
        if not self.even or self.processes == 1 or not self.ranks:
            return inner.open(own, replay)
        steps, head = inner.skipped()[0] if at is None else at.steps, None
        if steps:
            first, replay = first_batches(inner, 1, replay)
            head = next(iter(first), None)
        single, base = batching_of(self.base) is None, None if at is None else at.base
        real = None if self.real is None or size is None else self.real - steps * size
        if base is not None and is_finished(base):
            self._reader = _AgreeingReader(iter(()), self.ranks, single, lambda: base, real)
        else:
            self._reader = _AgreeingReader(inner.open(own, replay), self.ranks, single, inner.base_state, real)
        return in_step(self._reader, self.drop_last, head)

    @property
    def padded(self) -> Collection[int]:
        """Empty: padded batches contain their padding."""
        return ()

    def padding(self, number: int) -> Padding | None:
        """None: padded batches contain their padding."""
        return None

    def skipped(self) -> tuple[int, int | None]:
        """See `Source`."""
        steps, samples = self.inner.skipped()
        return steps, None if samples is None else samples * self.processes

    def with_sample_ids(self, own: bool = False) -> AgreedSource:
        """See `Source`."""
        return self.over(self.inner.with_sample_ids(own=True))

    def base_state(self) -> dict[str, Any] | None:
        """See `Source`."""
        return self.inner.base_state() if self._reader is None else self._reader.base_given

    @property
    def self_contained(self) -> bool:
        """False: the number of steps depends on the other processes."""
        return False


def in_step(reader: _AgreeingReader, drop_last: bool, head: Any = None) -> Iterator[Any]:
    """The batches of one process, as many as on the process with most batches.

    Args:
        reader: reads batches and exchanges their sizes.
        drop_last: as many as on the process with fewest batches instead.
        head: the first batch of the epoch; None for the first one that is read.

    Raises:
        DataError: a process has no samples, or another process could not read.
    """
    reader.read()
    try:
        while True:
            batch, sizes, real = reader.answers()
            if not any(sizes) or (drop_last and not all(sizes)):
                return
            if head is None:
                _check_all_have(sizes, reader.ranks)
                head = batch
            reader.read()
            yield _filled(batch, head, max(sizes), real, reader.single)
    finally:
        reader.answers(fails=False)


class _AgreeingReader:
    """Prefetches one batch and exchanges its size with the other processes.

    Args:
        batches: this process's batches.
        ranks: by shard of the data, the process whose size is used.
        single: the batches are unbatched samples.
        base_state: returns torchdata's state after the batch read last.
        real: samples left before the padding of the process's sampler; None if it adds none.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        ranks: Sequence[int],
        single: bool,
        base_state: Callable[[], dict[str, Any] | None],
        real: int | None,
    ) -> None:
        self.batches = batches
        self.ranks = ranks
        self.single = single
        self.base_state = base_state
        self.real = real
        self.base_read: dict[str, Any] | None = None
        self.base_given: dict[str, Any] | None = None
        self.pending: PendingCall | None = None
        self.announced: list[tuple[int, int]] = []
        self.batch: Any = None
        self.failure: Exception | None = None

    def read(self) -> None:
        """Read the next batch, so that the previous one counts as yielded, and start to send its size."""
        try:
            self.base_given = self.base_read
            self.batch = next(self.batches, _OVER)
            self.base_read = self.base_state()
            size = self._size()
            mine = _SIZES.pack(size, self._count(size))
        except Exception as error:
            self.failure, mine = error, _SIZES.pack(_FAILED, 0)
        self.pending = async_all_gather_bytes(mine, "DataLoader.__next__")

    def _size(self) -> int:
        if self.batch is _OVER:
            return 0
        return 1 if self.single else samples_in(self.batch) or 0

    def _count(self, size: int) -> int:
        """The number of real samples in the next batch, which has this size."""
        if self.real is None:
            return size
        real = min(size, self.real)
        self.real -= real
        return real

    def answers(self, fails: bool = True) -> tuple[Any, list[int], list[int]]:
        """The batch, or `_OVER`; its size in each shard of the data; and the number of real samples in each."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self.announced = [_SIZES.unpack(row) for row in pending.wait()]
        sizes, real = [size for size, _ in self.announced], [real for _, real in self.announced]
        if fails and self.failure is not None:
            raise self.failure
        if fails and _FAILED in sizes:
            raise DataError(
                "Cannot get the next batch of streams that the processes read separately.",
                f"Process {sizes.index(_FAILED)} could not read its stream.",
                f"See the error of process {sizes.index(_FAILED)}.",
            )
        return self.batch, [sizes[rank] for rank in self.ranks], [real[rank] for rank in self.ranks]


def _check_all_have(sizes: list[int], ranks: Sequence[int]) -> None:
    if not all(sizes):
        without = [rank for rank, size in zip(ranks, sizes, strict=True) if not size]
        raise DataError(
            "Cannot begin an epoch of streams that the processes read separately.",
            f"The stream of process {without[0]} has no samples, so it cannot take part in a step.",
            "Divide the stream into shards that all have samples, use fewer processes, or set even_batches=False.",
        )


def _filled(batch: Any, head: Any, wanted: int, real: list[int], single: bool) -> Any:
    """The batch, or samples from the beginning instead of it, with its padding."""
    if all(count == wanted for count in real):
        return batch
    if single:
        padding = Padding.by_process([None if count else 0 for count in real], 0)
        return PaddedBatch(head if batch is _OVER else batch, padding)
    size = 0 if batch is _OVER else samples_in(batch) or 0
    if size < wanted:
        filler = cut(join([head] * (wanted // (samples_in(head) or 1) + 1)), 0, wanted - size)
        batch = join([batch, filler]) if size else filler
    return PaddedBatch(batch, Padding.by_process(real, wanted))
