"""Processes with streams of their own, of which nobody knows the length, taking the same number of steps.

At every step each process says how many samples it has for the next one, and how many of these its own sampler did not
add. Whoever has run out takes part with samples from its beginning, all of them marked as added, until the last process
has run out too.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Final

from torch.utils.data import DataLoader

from accel_data.order import Draw, Draws
from accel_data.padding import Marked, Padding
from accel_data.progress import Position
from accel_data.samplers import batching_of
from accel_data.seeding import SampleSeed
from accel_data.slicing import cut, join, samples_in
from accel_data.sources import Source, first_batches
from accel_data.stateful import is_finished
from accel_state import current
from accel_state.errors import DataError
from accel_state.protocol import PendingCall, start_all_gather_bytes

__all__ = ("AgreedSource", "in_step")

_OVER: Final = object()
_FAILED: Final = -1
"""Told in place of a size by a process that could not read."""

_SIZES: Final = struct.Struct("<qq")
"""Samples of the next batch, and how many of them are real."""


class AgreedSource:
    """Batches out of a source that is this process's own already.

    Args:
        inner: gives this process's batches.
        processes: how many have such a source.
        even: let all take the same number of steps, with batches of one size in each.
        drop_last: end when the first process runs out.
        ranks: by part of the data, a process that reads it; none where the others are not there to agree with.
        real: samples of an epoch of this process before those that its own sampler adds; None when it adds none.
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
        self.inner = inner
        self.base: DataLoader[Any] = inner.base
        self.processes = processes
        self.even = even
        self.drop_last = drop_last
        self.ranks = ranks
        self.real = real
        self._asking: _Asking | None = None

    @property
    def step_size(self) -> int | None:
        """See `Source`."""
        size = self.inner.step_size
        return None if size is None else size * self.processes

    @property
    def sample_seed(self) -> SampleSeed | None:
        """See `Source`."""
        return self.inner.sample_seed

    @property
    def draws(self) -> Draws:
        """See `Source`."""
        return self.inner.draws

    @property
    def counts_steps(self) -> bool:
        """True: the processes have no order in common."""
        return True

    @property
    def index(self) -> int:
        """See `Source`."""
        return self.inner.index

    def names(self) -> Iterable[Any] | None:
        """See `Source`."""
        return self.inner.names()

    def named(self, own: bool = False) -> AgreedSource:
        """See `Source`."""
        return self._over(self.inner.named(own=True))

    def missing_from_len(self) -> int:
        """See `Source`."""
        return self.inner.missing_from_len()

    def length(self) -> int | None:
        """None: it is not known what the others have."""
        return None

    def remainder(self, start: int | None) -> int:
        """-1: it is not known what the others have."""
        return -1

    def shortage(self) -> str | None:
        """None: it is not known what the others have."""
        return None

    def steps(self, at: Position | None) -> int | None:
        """None: it is not known what the others have."""
        return None

    @property
    def pads(self) -> bool:
        """See `Source`."""
        return False

    @property
    def may_be_empty(self) -> bool:
        """See `Source`."""
        return not self.even or self.drop_last

    def open(self, at: Position | None) -> Iterator[Any]:
        """See `Source`."""
        inner = self.inner
        size, own = inner.step_size, None
        if at is not None:
            own = dataclasses.replace(at, samples=None if size is None else at.steps * size)
        self._asking = None
        if not self.even or self.processes == 1 or not self.ranks:
            return inner.open(own)
        steps = inner.skipped()[0] if at is None else at.steps
        head = next(iter(first_batches(inner, 1)), None) if steps else None
        single, base = batching_of(self.base) is None, None if at is None else at.base
        real = None if self.real is None or size is None else self.real - steps * size
        if base is not None and is_finished(base):
            self._asking = _Asking(iter(()), self.ranks, single, lambda: base, real)
        else:
            self._asking = _Asking(inner.open(own), self.ranks, single, inner.base_state, real)
        return in_step(self._asking, self.drop_last, head)

    @property
    def padded(self) -> Collection[int]:
        """None of them: see `padding`."""
        return ()

    def padding(self, number: int) -> Padding | None:
        """None: batches that were filled up carry their own marks."""
        return None

    def upcoming(self, restored: Draw | None = None) -> Draw | None:
        """See `Source`."""
        return self.inner.upcoming(restored)

    def set_epoch(self, epoch: int) -> None:
        """See `Source`."""
        self.inner.set_epoch(epoch)

    def skipping(self, steps: int) -> AgreedSource:
        """See `Source`."""
        return self._over(self.inner.skipping(steps))

    def _over(self, inner: Source) -> AgreedSource:
        return AgreedSource(inner, self.processes, self.even, self.drop_last, self.ranks, self.real)

    def skipped(self) -> tuple[int, int | None]:
        """See `Source`."""
        steps, samples = self.inner.skipped()
        return steps, None if samples is None else samples * self.processes

    @property
    def continues_from_base(self) -> bool:
        """See `Source`."""
        return self.inner.continues_from_base

    def base_state(self) -> dict[str, Any] | None:
        """See `Source`."""
        return self.inner.base_state() if self._asking is None else self._asking.base_given

    @property
    def self_contained(self) -> bool:
        """See `Source`."""
        return False

    def identity(self) -> str:
        """See `Source`."""
        return self.inner.identity()

    def obstacle(self) -> str | None:
        """See `Source`."""
        return self.inner.obstacle()

    def foreign_obstacle(self) -> str | None:
        """See `Source`."""
        return self.inner.foreign_obstacle()


def in_step(asking: _Asking, drop_last: bool, head: Any = None) -> Iterator[Any]:
    """The batches of one process, as many as the process that has most of them.

    Args:
        asking: reads them and tells the others.
        drop_last: as many as the process that has fewest of them instead.
        head: the first batch of the epoch; that of `batches` when None.

    Raises:
        DataError: a process has no sample at all, so it cannot take part; or another process could not read.
    """
    asking.ask()
    try:
        while True:
            batch, sizes, real = asking.answers()
            if not any(sizes) or (drop_last and not all(sizes)):
                return
            if head is None:
                _check_all_have(sizes, asking.ranks)
                head = batch
            asking.ask()
            yield _filled(batch, head, max(sizes), real, asking.single)
    finally:
        asking.answers(fails=False)


class _Asking:
    """Reads one batch ahead and learns what the others have read.

    Args:
        batches: this process's own.
        ranks: by part of the data, the process whose answer counts.
        single: what comes are samples that are not batched.
        base_state: what torchdata needs to continue after the batch that was read last.
        real: how many samples are to come before those that the process's sampler adds; None when it adds none.
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
        self.transport = current.process_or_start().transport
        self.ranks = ranks
        self.single = single
        self.base_state = base_state
        self.real = real
        self.base_read: dict[str, Any] | None = None
        self.base_given: dict[str, Any] | None = None
        self.posted: PendingCall | None = None
        self.told: list[tuple[int, int]] = []
        self.batch: Any = None
        self.failure: Exception | None = None

    def ask(self) -> None:
        """Read the next batch, which lets the one before count as given out, and start telling the others its size."""
        try:
            self.base_given = self.base_read
            self.batch = next(self.batches, _OVER)
            self.base_read = self.base_state()
            size = self._size()
            mine = _SIZES.pack(size, self._count(size))
        except Exception as error:
            self.failure, mine = error, _SIZES.pack(_FAILED, 0)
        self.posted = start_all_gather_bytes(self.transport, "DataLoader.__next__", mine)

    def _size(self) -> int:
        if self.batch is _OVER:
            return 0
        return 1 if self.single else samples_in(self.batch) or 0

    def _count(self, size: int) -> int:
        """How many samples of the next batch, which has this size, are real."""
        if self.real is None:
            return size
        real = min(size, self.real)
        self.real -= real
        return real

    def answers(self, fails: bool = True) -> tuple[Any, list[int], list[int]]:
        """The batch, or what says that there is none; its size in each part of the data; and what of it is real."""
        if self.posted is not None:
            posted, self.posted = self.posted, None
            self.told = [_SIZES.unpack(row) for row in posted.wait()]
        sizes, real = [size for size, _ in self.told], [real for _, real in self.told]
        if fails and self.failure is not None:
            raise self.failure
        if fails and _FAILED in sizes:
            raise DataError(
                "The next batch of streams that the processes read each for itself was asked for.",
                f"Process {sizes.index(_FAILED)} could not read its stream.",
                f"Look at the error of process {sizes.index(_FAILED)}.",
            )
        return self.batch, [sizes[rank] for rank in self.ranks], [real[rank] for rank in self.ranks]


def _check_all_have(sizes: list[int], ranks: Sequence[int]) -> None:
    if not all(sizes):
        without = [rank for rank, size in zip(ranks, sizes, strict=True) if not size]
        raise DataError(
            "An epoch of streams that the processes read each for itself was begun.",
            f"The stream of process {without[0]} has no sample, so it cannot take part in any step.",
            "Divide the stream into parts that all have samples, use fewer processes, or set even_batches=False.",
        )


def _filled(batch: Any, head: Any, wanted: int, real: list[int], single: bool) -> Any:
    """The batch, or samples from the beginning in its place, with the mark that says what was added."""
    if all(count == wanted for count in real):
        return batch
    if single:
        return Marked(
            head if batch is _OVER else batch, Padding.by_process([None if count else 0 for count in real], 0)
        )
    size = 0 if batch is _OVER else samples_in(batch) or 0
    if size < wanted:
        filler = cut(join([head] * (wanted // (samples_in(head) or 1) + 1)), 0, wanted - size)
        batch = join([batch, filler]) if size else filler
    return Marked(batch, Padding.by_process(real, wanted))
