"""Which samples of an epoch a process reads, computed by arithmetic on their positions.

With B samples per process and P processes a step takes G = B * P samples of the global order; in step i process r has
the positions iG + rB up to iG + (r + 1)B. The samples after the full steps are dropped, distributed unevenly,
or completed with samples from the beginning.

A custom sampler has no positions: every process enumerates all indices or batches and selects its own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, Protocol, TypeVar

from torch.utils.data import BatchSampler, DataLoader, Sampler

from accel_data.kept_iterators import keeps_iterator
from accel_data.order import LastRNG, RNGState, begin_epoch, is_stock_batching, replaying
from accel_state.errors import DataError, SettingError

__all__ = (
    "BatchSamplerShard",
    "Drawn",
    "MappedBatches",
    "Padding",
    "ShardPlan",
    "SkipBatchSampler",
    "Step",
    "StepCounts",
    "UnbatchedSampler",
    "batching_of",
    "check_process",
    "check_split",
    "divided_batches",
    "grouped_batches",
    "innermost_sampler",
    "length_of",
    "shard_samples",
    "shortage",
)

T = TypeVar("T")


@dataclass(frozen=True)
class Padding:
    """The number of real samples in one global step, by process.

    Args:
        total: real samples of all processes together; -1 when batches are counted, not samples.
        batch_size: samples of one process, padding included.
        processes: number of processes.
        counts: real samples of each process, where None means its whole batch; None instead of the sequence when the
            real samples are the first `total` ones of the step.
    """

    total: int
    batch_size: int
    processes: int
    counts: tuple[int | None, ...] | None = None

    @classmethod
    def by_process(cls, counts: Sequence[int | None], batch_size: int) -> Padding:
        """Create it from the number of real samples of each process."""
        total = -1 if None in counts else sum(count or 0 for count in counts)
        return cls(total, batch_size, len(counts), tuple(counts))

    def of(self, process: int) -> int | None:
        """Real samples of one process; None means all of its batch."""
        if self.counts is not None:
            return self.counts[process]
        return min(max(self.total - process * self.batch_size, 0), self.batch_size)

    def of_single(self) -> Padding:
        """The padding of a loader that does not batch: each process has one sample, real or padding."""
        return self.by_process([None if self.of(process) else 0 for process in range(self.processes)], 0)

    def __bool__(self) -> bool:
        return self.counts is not None or self.total < self.batch_size * self.processes


@dataclass(frozen=True)
class StepCounts(Padding):
    """The samples of each process in a step in which no sample is repeated, so that batches have sizes of their own.

    A process with a count of 0 has a stand-in, whose samples count nothing.

    Args:
        weights: with how much each process counts in the gradient; its samples by default.
    """

    weights: tuple[float, ...] = ()

    @classmethod
    def each(cls, counts: Sequence[int], weights: Sequence[float] | None = None) -> StepCounts:
        """Create it from the samples of each process."""
        weights = counts if weights is None else weights
        return cls(sum(counts), max(counts), len(counts), tuple(counts), tuple(weights))


Step = tuple[list[T], Padding | None]


@dataclass(frozen=True)
class ShardPlan:
    """The shard of one process in a global order.

    Args:
        length: samples in the order.
        batch_size: samples of one process in one step (B).
        processes: number of processes (P).
        index: index of this process (r).
        even: pad the last step with samples from the beginning.
        drop_last: drop an incomplete last step.
        start: position of the order at which the plan begins.

    Example:
        >>> plan = ShardPlan(length=10, batch_size=2, processes=2, index=1)
        >>> [plan.positions(step) for step in range(len(plan))]
        [[2, 3], [6, 7], [0, 1]]
    """

    length: int
    batch_size: int
    processes: int = 1
    index: int = 0
    even: bool = True
    drop_last: bool = False
    start: int = 0

    @property
    def step_size(self) -> int:
        """Samples of all processes in one step (G)."""
        return self.batch_size * self.processes

    @property
    def full_steps(self) -> int:
        """Steps that need no padding."""
        return max(self.length - self.start, 0) // self.step_size

    @property
    def tail(self) -> int:
        """Samples after the full steps."""
        return max(self.length - self.start, 0) % self.step_size

    @property
    def first(self) -> int:
        """Position of this process's first sample."""
        return self.start + self.index * self.batch_size

    def __len__(self) -> int:
        return self.full_steps + self.has_tail

    @property
    def has_tail(self) -> bool:
        """Whether this process has a batch after the full steps."""
        if self.drop_last or not self.tail:
            return False
        return self.even or self.tail > self.index * self.batch_size

    def positions(self, step: int) -> list[int]:
        """Positions in the order of this process's samples in a step."""
        first = self.first + step * self.step_size
        if step < self.full_steps:
            return list(range(first, first + self.batch_size))
        return self.tail_positions()

    def tail_positions(self) -> list[int]:
        """Positions of this process's samples in the step after the full ones; positions before `start` complete it."""
        first = self.first + self.full_steps * self.step_size
        real = list(range(first, min(first + self.batch_size, self.length)))
        if not self.even:
            return real
        cycled = min(self.step_size, self.length)
        return real + [(first + i - self.length) % cycled for i in range(len(real), self.batch_size)]

    def padding(self) -> Padding | None:
        """Padding of the step after the full ones; None when nothing is added."""
        if self.drop_last or not self.even or not self.tail:
            return None
        return Padding(self.tail, self.batch_size, self.processes)

    def remainder(self) -> int:
        """Real samples of an incomplete last step; 0 when it is complete, -1 when it is dropped."""
        return -1 if self.drop_last else self.tail


def shortage(length: int | None, processes: int, pads: bool) -> str | None:
    """Why `length` samples are too few, or None.

    Args:
        length: samples of the epoch; None when unknown.
        processes: number of processes.
        pads: whether the last step is padded with samples from the beginning.
    """
    if length == 0:
        return "It has no samples."
    if length is None or length >= processes or pads:
        return None
    return f"It has {length} samples for {processes} processes, so process {length} would have none."


def shard_samples(
    samples: Iterable[T], plan: ShardPlan, begun: list[T] | None = None, for_all: bool = False
) -> Iterator[Step[T]]:
    """This process's batches of a sequence of unknown length, with the padding of each step.

    Args:
        samples: indices or samples of all processes.
        plan: how to shard them; its length is ignored.
        begun: the samples of the epoch's first step, if `samples` begin later; the plan's start is ignored then.
        for_all: raise on every process if any process would have no sample.

    Raises:
        DataError: see `for_all`.
    """
    source = iter(samples)
    if begun is not None:
        head, remaining = begun, source
    else:
        head = list(islice(source, plan.step_size))
        remaining = chain(head[plan.start :], islice(source, max(plan.start - len(head), 0), None))
    if for_all:
        _check_enough(len(head), plan)
    first = plan.index * plan.batch_size
    while len(chunk := list(islice(remaining, plan.step_size))) == plan.step_size:
        yield chunk[first : first + plan.batch_size], None
    last = ShardPlan(len(chunk), plan.batch_size, plan.processes, plan.index, plan.even, plan.drop_last)
    if last.has_tail:
        filled = [*chunk, *islice(cycle(head), plan.step_size - len(chunk))] if plan.even else chunk
        yield filled[first : first + plan.batch_size], last.padding()


def _check_enough(count: int, plan: ShardPlan) -> None:
    obstacle = shortage(count, plan.processes, plan.even and not plan.drop_last)
    if obstacle is not None:
        raise DataError(
            "Cannot shard an epoch between the processes.",
            obstacle,
            "Use fewer processes, or even_batches=True and drop_last=False.",
        )


class Drawn(Protocol):
    """Records the batches of indices that a shard draws; implemented in a layer above, for records of failures."""

    def keep(self, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        """Yield the batches of an epoch, and record each when it is drawn."""


class BatchSamplerShard(BatchSampler):
    """One process's shard of the batches of a batch sampler.

    With torch's samplers each process computes only its own indices. Custom samplers and batch samplers are enumerated.

    Args:
        batch_sampler: yields the batches of all processes.
        num_processes: number of processes.
        process_index: index of this process.
        split_batches: split each batch into one shard per process; otherwise each process takes whole batches in turn.
        even_batches: pad the last step with samples from the beginning, so that all processes have equal batches; a
            single process never pads.

    Attributes:
        padded: the padding of the padded batches of the epoch begun last, by number; grows while they are drawn.
        yields_single_samples: whether the loader takes single indices out of these batches.
        compared: whether the processes are to compare what they draw from a custom sampler.
        first_drawn: then, the first indices or batches of the epoch begun last, of all processes.

    Raises:
        SettingError: a number is out of range, or a batch cannot be split into equal shards.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.last_rng = LastRNG()
        self.drawn: Drawn | None = None
        self.padded: dict[int, Padding] = {}
        self.skipped_steps = 0
        self._start: int | None = None
        self._replay: RNGState | None = None
        self._unseen = 0
        self.yields_single_samples = False
        self.compared = False
        self.first_drawn: list[Any] = []
        check_process(num_processes, process_index)
        if split_batches:
            check_split(self.batch_size, num_processes)

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler below, or None when a custom batch sampler has none."""
        return innermost_sampler(self.batch_sampler)

    @property
    def total_length(self) -> int:
        """Batches of all processes."""
        return len(self.batch_sampler)

    @property
    def has_custom_batches(self) -> bool:
        """Whether batches come from a custom batch sampler, so that single samples have no position."""
        return not is_stock_batching(self.batch_sampler)

    @property
    def pads(self) -> bool:
        """Whether a short last step is padded; a single process never pads."""
        return self.even_batches and self.num_processes > 1

    @property
    def gives_all_a_batch(self) -> bool:
        """Whether a process takes part in a last step of fewer samples than processes."""
        return self.pads and not self.drop_last

    @property
    def per_process(self) -> int | None:
        """Samples of one process in one step; None when the batch sampler has no batch size."""
        if self.batch_size is None:
            return None
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    @property
    def step_size(self) -> int | None:
        """Samples of all processes in one step; None when the batch sampler has no batch size."""
        return None if self.per_process is None else self.per_process * self.num_processes

    def skipping(self, steps: int) -> BatchSamplerShard:
        """A shard whose epochs begin `steps` steps later; it shares all other state."""
        other = copy.copy(self)
        other.skipped_steps = self.skipped_steps + steps
        other._start, other._replay, other._unseen = None, None, 0
        return other

    def starting(self, position: int | None, replay: RNGState | None, unseen: int = 0) -> BatchSamplerShard:
        """A shard for one resumed epoch; it shares all other state.

        Args:
            position: start of the epoch, in samples or, with a custom batch sampler, in steps; None starts after the
                skipped steps.
            replay: the random state of the epoch; the sampler draws a new one when None.
            unseen: batches at the start whose indices are drawn, but which are not read.
        """
        other = copy.copy(self)
        other._start, other._replay, other._unseen = position, replay, unseen
        return other

    def plan(self, length: int, position: int | None = None) -> ShardPlan:
        """This process's shard of an order of `length` samples from a position on."""
        width = self.per_process or 1
        start = self.skipped_steps * width * self.num_processes if position is None else position
        even, drop_last = self.pads, self.drop_last
        return ShardPlan(length, width, self.num_processes, self.process_index, even, drop_last, start)

    def __iter__(self) -> Iterator[list[int]]:
        # For speed, no Python frame of this module runs between two full batches, unless they are recorded.
        batches = chain.from_iterable(self._runs())
        return batches if self.drawn is None else self.drawn.keep(batches)

    def _runs(self) -> Iterator[Iterable[list[int]]]:
        """The batches in runs: where they are slices of an order, one run of full batches and one of a short batch."""
        # This generator starts at the first batch, when torch's samplers draw too: a loader with workers creates a
        # second iterator and discards the first one.
        padded: dict[int, Padding] = {}
        self.padded = padded
        if self.has_custom_batches:
            yield self._recorded(self._custom_batches(), padded)
            return
        order = begin_epoch(self.batch_sampler.sampler, self.last_rng, self._replay)
        if isinstance(order, Iterator):
            order = self._first_kept(order, self.step_size or 1)
            yield self._recorded(shard_samples(order, self.plan(0, self._start)), padded)
            return
        plan = self.plan(len(order), self._start)
        yield order.rows(plan.first, plan.batch_size, plan.step_size, plan.full_steps)
        if plan.has_tail:
            added = plan.padding()
            if added:
                self._record(padded, plan.full_steps, added)
            yield (order.at(plan.tail_positions()),)
        order.exhausted()

    def _custom_batches(self) -> Iterator[Step[int]]:
        skip = self.skipped_steps if self._start is None else self._start
        with replaying(self.batch_sampler, self.sampler, self.last_rng, self._replay):
            batches = self._first_kept(iter(self.batch_sampler), self.num_processes)
            if self.split_batches:
                steps = divided_batches(batches, self.plan(0))
            else:
                steps = grouped_batches(batches, self.num_processes)
            yield from _of_process(steps, self, skip)

    def _first_kept(self, drawn: Iterator[T], count: int) -> Iterator[T]:
        """Yield what the sampler draws; the first `count` are kept if processes compare them."""
        if not self.compared:
            return drawn
        self.first_drawn = list(islice(drawn, count))
        return chain(self.first_drawn, drawn)

    def _recorded(self, steps: Iterable[Step[int]], padded: dict[int, Padding]) -> Iterator[list[int]]:
        for number, (batch, padding) in enumerate(steps):
            if padding:
                self._record(padded, number, padding)
            yield batch

    def _record(self, padded: dict[int, Padding], number: int, padding: Padding) -> None:
        padded[number - self._unseen] = padding.of_single() if self.yields_single_samples else padding

    def __len__(self) -> int:
        if not self.has_custom_batches:
            return len(self.plan(len(self.batch_sampler.sampler), self._start))  # type: ignore[arg-type]
        return max(self.steps_of_custom_batches() - (self.skipped_steps if self._start is None else self._start), 0)

    def steps_of_custom_batches(self, index: int | None = None) -> int:
        """Number of batches of a process, skipped ones included, by the length of a custom batch sampler.

        Args:
            index: index of the process; None for this one.
        """
        index = self.process_index if index is None else index
        batches = len(self.batch_sampler)
        if self.split_batches:
            return batches - (not self.pads and self._last_batch_lacks(index, batches))
        steps, rest = divmod(batches, self.num_processes)
        return steps + bool(rest and not self.drop_last and (self.pads or index < rest))

    def _last_batch_lacks(self, index: int, batches: int) -> bool:
        """Whether the last of the batches to split has no samples for a process, if only that one is short."""
        size, samples = self.step_size or 1, length_of(self.sampler)
        return samples is not None and 0 < samples - (batches - 1) * size <= index * (self.per_process or 1)

    def steps_of(self, index: int) -> int | None:
        """Number of batches of a process, by the reported length; None when no length is reported."""
        try:
            if self.has_custom_batches:
                return self.steps_of_custom_batches(index)
            return len(dataclasses.replace(self.plan(len(self.batch_sampler.sampler)), index=index))  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None


def grouped_batches(batches: Iterator[Sequence[int]], processes: int) -> Iterator[list[list[int]]]:
    """The steps of all processes: one batch of a custom batch sampler for each, and fewer in the last step."""
    while step := [list(batch) for batch in islice(batches, processes)]:
        yield step


def divided_batches(batches: Iterable[Sequence[int]], plan: ShardPlan) -> Iterator[list[list[int]]]:
    """The steps of all processes: one batch of a custom batch sampler, split between them.

    Args:
        batches: the batches of all processes together.
        plan: how to shard each batch; its length is ignored.

    Raises:
        DataError: a batch is larger than the sampler's batch size.
    """
    for number, batch in enumerate(batches):
        if len(batch) > plan.step_size:
            raise DataError(
                f"Cannot split batch {number} into {plan.processes} shards of {plan.batch_size} (split_batches=True).",
                f"The batch sampler yielded {len(batch)} indices, more than its batch_size of {plan.step_size}.",
                "Set the batch sampler's batch_size to its largest batch, or remove split_batches.",
            )
        yield [list(batch[first : first + plan.batch_size]) for first in range(0, len(batch), plan.batch_size)]


def _of_process(steps: Iterator[list[list[int]]], shard: BatchSamplerShard, skip: int) -> Iterator[Step[int]]:
    """This process's batches in the steps of a custom batch sampler.

    If the shard pads, the processes have batches of equal size in every step: a sampler with a batch size promises
    batches of that size at most, so samples from the beginning complete those that are shorter or missing. A sampler
    without one may vary its batches, for example with their numbers of tokens: there, the batches of the first step
    take the place of missing ones, and no batch is changed.

    Args:
        steps: at most one batch for each process.
        shard: this process's shard.
        skip: number of steps to skip.
    """
    processes, index, size = shard.num_processes, shard.process_index, shard.per_process
    first: list[list[int]] = []
    head: list[int] = []
    upcoming = next(steps, None)
    while upcoming is not None:
        step, upcoming = upcoming, next(steps, None)
        first = first or step
        head += [*chain.from_iterable(step)][: max((shard.step_size or 0) - len(head), 0)]
        lacks = len(step) < processes
        if skip:
            skip -= 1
        elif lacks and shard.drop_last and not shard.split_batches:
            return
        elif shard.pads:
            complete = [*step, *islice(cycle(first), processes - len(step))] if size is None else step
            if size is not None and (lacks or len({len(batch) for batch in step}) > 1):
                filler = cycle(head)
                complete = [
                    [*batch, *islice(filler, max(size - len(batch), 0))]
                    for batch in [*step, *[[]] * (processes - len(step))]
                ]
            yield complete[index], _padding_of(complete, step)
        elif index < len(step):
            yield step[index], None if upcoming or lacks or size is None else _short_step(step, size)


def _padding_of(complete: list[list[int]], step: list[list[int]]) -> Padding | None:
    """The padding of a step whose batches were completed; None if all samples are real."""
    sizes, real = [len(batch) for batch in complete], [len(batch) for batch in step]
    real += [0] * (len(complete) - len(step))
    return None if real == sizes else Padding.by_process(real, sizes[0] if len(set(sizes)) == 1 else 0)


def _short_step(step: list[list[int]], size: int) -> Padding | None:
    """The padding of a last step with short batches, for scripts that pad their results to the sampler's batch size."""
    counts = [len(batch) for batch in step]
    if all(count >= size for count in counts):
        return None
    # The length of the data does not determine the number of samples in the last step, so the total is unknown.
    return Padding(-1, size, len(counts), tuple(counts))


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches.

    Args:
        batch_sampler: yields the batches.
        skip_batches: number of batches to skip at the beginning of every epoch.
    """

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self._shard: BatchSamplerShard | None = None
        if isinstance(batch_sampler, BatchSamplerShard):
            self._shard = batch_sampler.skipping(skip_batches)
        elif is_stock_batching(batch_sampler):
            self._shard = BatchSamplerShard(batch_sampler).skipping(skip_batches)

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler below, or None when a custom batch sampler has none."""
        return innermost_sampler(self.batch_sampler)

    @property
    def total_length(self) -> int:
        """Number of batches, skipped ones included."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        if self._shard is not None:
            return iter(self._shard)
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)


class MappedBatches(BatchSampler):
    """A batch sampler whose indices are replaced on the way to the data set, which may be in a DataLoader worker.

    Args:
        batch_sampler: yields batches of indices; its attributes can be read here.
        replaced: returns the batches with other indices.
    """

    def __init__(
        self, batch_sampler: BatchSampler, replaced: Callable[[Iterator[list[int]]], Iterator[list[Any]]]
    ) -> None:
        self.batch_sampler = batch_sampler
        self.replaced = replaced
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = batch_sampler.drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        return self.replaced(iter(self.batch_sampler))

    def __len__(self) -> int:
        return len(self.batch_sampler)

    @property
    def even_batches(self) -> bool:
        """Whether the batch sampler pads its last step; `join_uneven_inputs` sets it."""
        return bool(self.batch_sampler.even_batches)  # type: ignore[attr-defined]

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self.batch_sampler.even_batches = even  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "batch_sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


class UnbatchedSampler(Sampler[int]):
    """Yields single indices from batches of one index, for loaders without batching.

    Args:
        shard: yields batches of one index.
    """

    def __init__(self, shard: BatchSampler) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[int]:
        return (batch[0] for batch in self.shard)

    def __len__(self) -> int:
        return len(self.shard)


def batching_of(loader: DataLoader[Any]) -> Any:
    """A loader's batch sampler, which may be set as its `sampler`; None when the loader yields single samples."""
    if keeps_iterator(loader):
        return loader.batch_sampler.sampler  # type: ignore[union-attr]
    return (
        loader.sampler
        if loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler)
        else loader.batch_sampler
    )


def innermost_sampler(batch_sampler: Any) -> Any:
    """The sampler of single indices inside any number of nested batch samplers; None if there is none."""
    while hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    return getattr(batch_sampler, "sampler", None)


def length_of(source: Any) -> int | None:
    """The result of `len`, or None if there is no length."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def check_process(num_processes: int, process_index: int) -> None:
    """Check the index of a process.

    Raises:
        SettingError: there is no such process.
    """
    if num_processes < 1 or not 0 <= process_index < num_processes:
        raise SettingError(
            f"Cannot shard data for process {process_index} of {num_processes}.",
            "There is no such process.",
            "Give num_processes of at least 1 and a process_index from 0 to num_processes - 1.",
        )


def check_split(batch_size: int | None, num_processes: int) -> None:
    """Check that batches can be split into equal shards.

    Raises:
        SettingError: the batch size is not a multiple of the number of processes.
    """
    if batch_size is None or batch_size % num_processes:
        raise SettingError(
            f"Cannot use split_batches=True with batches of {batch_size} samples and {num_processes} processes.",
            "Each batch is split into one equal shard per process.",
            f"Give a batch size that is a multiple of {num_processes}, or remove split_batches.",
        )
