"""Several data sets read as one, each with its weight."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import count, pairwise
from numbers import Real
from typing import Any, Final, Literal, get_args

from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler

from accel_data.interleave import Interleaving
from accel_data.permutation import Permutation
from accel_ops.agreement import StoreBarrier
from accel_state import current
from accel_state.errors import CheckpointError, Conflict, DataError, SettingError, UnknownKind
from accel_state.settings.schema import closest

__all__ = ("MixtureDataset", "MixtureStream", "ResolvedBatches", "SourceCount", "StopWhen")

logger = logging.getLogger(__name__)

StopWhen = Literal["first_exhausted", "all_exhausted", "repeat"]
"""When an epoch of a mixture ends."""

Weights = Mapping[str, Any]
Schedule = Sequence[tuple[int, Weights]]

_DEADLINE: Final = 600.0
_CHUNK: Final = 256


@dataclass(frozen=True)
class SourceCount:
    """What one source of a mixture has given.

    Args:
        samples: how many it gave.
        epochs: how often it was read through, the running pass in part.
        asked: the share that the weights give it, of all samples so far.
        given: the share that it gave.
    """

    samples: int
    epochs: float
    asked: float
    given: float


class _Weighted:
    """The sources of a mixture by name, and the order in which they are read."""

    def __init__(self, sources: Mapping[str, Any], weights: Weights | None, schedule: Schedule, stop: StopWhen) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise UnknownKind(
                "Cannot make a mixture of data sets.",
                f"The sources are {sources!r}; they have to be a dict of at least one data set.",
                'Give the data sets by name: {"code": a, "text": b}.',
            )
        if stop not in get_args(StopWhen):
            raise SettingError(
                f"Cannot make a mixture with stop={stop!r}.",
                f"The value must be one of {', '.join(get_args(StopWhen))}.",
                "Leave it out to end an epoch when the first source is exhausted.",
            )
        self.stop = stop
        # The order of the names in the dict does not matter, so that a resumed script may have another one.
        self._names = sorted(sources)
        self._sources = [sources[name] for name in self._names]
        self._plan(self._checked(weights, schedule))

    def _checked(self, weights: Weights | None, schedule: Schedule) -> list[tuple[int, list[int]]]:
        """The schedule from sample 0 on, in integer weights."""
        given = [(0, weights)] if weights is not None else []
        starts = [start for start, _ in schedule]
        wrong = next((start for start in starts if type(start) is not int or start < 0), None)
        if wrong is not None or any(later <= start for start, later in pairwise(starts)):
            raise SettingError(
                f"Cannot use a schedule that begins at the samples {', '.join(map(str, starts))}.",
                "Each entry must begin at a later sample than the one before; samples are integers of at least 0.",
                "Sort the entries by their first sample, and give one for each.",
            )
        if not given and (not starts or starts[0] > 0):
            raise SettingError(
                "Cannot mix the sources " + ", ".join(self._names) + ".",
                "No weights are given for sample 0.",
                "Give weights={...}, or let the schedule begin at sample 0.",
            )
        return [(start, self._integers(each)) for start, each in (*given, *schedule)]

    def _integers(self, weights: Weights) -> list[int]:
        """Weights in the order of the sources, as integers without a common divisor; a source left out has weight 0."""
        failed = f"Cannot mix the sources {', '.join(self._names)} with the weights {weights!r}."
        if not isinstance(weights, Mapping):
            raise UnknownKind(failed, "The weights are not a dict.", 'Give them by source: {"code": 0.7, "text": 0.3}.')
        unknown = next((name for name in weights if name not in self._names), None)
        if unknown is not None:
            near = closest(str(unknown), self._names)
            raise SettingError(
                failed,
                f"There is no source {unknown!r}.",
                f"Did you mean {near!r}?" if near else f"Give a weight to {', '.join(self._names)} alone.",
            )
        exact = [_exact(weights.get(name, 0), name, failed) for name in self._names]
        if not any(exact):
            raise SettingError(
                failed,
                f"All weights are 0, so that neither {' nor '.join(self._names)} would be read.",
                "Give at least one source a weight above 0.",
            )
        scale = math.lcm(*(weight.denominator for weight in exact))
        integers = [int(weight * scale) for weight in exact]
        return [weight // math.gcd(*integers) for weight in integers]

    def _plan(self, schedule: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Follow a schedule that begins at sample 0."""
        # Of two entries at one sample, the later one holds.
        self._schedule = sorted({start: list(weights) for start, weights in schedule}.items())
        self._order = Interleaving(self._schedule[0][1])
        for start, weights in self._schedule[1:]:
            self._order.change(start, weights)

    @property
    def schedule(self) -> list[tuple[int, dict[str, Fraction]]]:
        """From which sample on which weights hold, with those of `set_weights`; the weights of an entry add up to 1."""
        return [
            (start, {name: Fraction(weight, sum(weights)) for name, weight in zip(self._names, weights, strict=True)})
            for start, weights in self._schedule
        ]


def _exact(weight: Any, name: str, failed: str) -> Fraction:
    """A weight as a fraction: a float is the decimal number that it is written as."""
    if isinstance(weight, bool) or not isinstance(weight, (Real, Decimal)):
        raise UnknownKind(
            failed,
            f"The weight of {name!r} is of type {type(weight).__name__}.",
            "Give a number, or a fractions.Fraction where it has to be exact.",
        )
    if not math.isfinite(weight) or weight < 0:
        raise SettingError(
            failed,
            f"The weight of {name!r} is {weight}.",
            "Give a finite number of at least 0; 0 leaves the source out.",
        )
    return Fraction(str(weight))


class MixtureDataset(_Weighted, Dataset[Any]):
    """Several data sets with indices, read as one: each gives its share of the samples, evenly spread.

    Arithmetic alone decides which source gives sample n, so that any position is reached at once. Each source stays
    within K samples of its share at every prefix, where K is the number of sources (`accel_data.interleave` has the
    proof; with two sources it is half a sample). Each pass over a source has an order of its own, drawn from the seed,
    the name of the source and the number of the pass.

    Read it in order: `DataLoader(mixture, batch_size=8)`, without `shuffle=True`. A prepared loader saves the schedule
    with its position, and continues on any number of processes and workers.

    Args:
        sources: data sets with `__getitem__` and `__len__`, by name.
        weights: of the sources, by name; a source left out has weight 0. They need not add up to 1. Floats count as the
            decimal numbers that they are written as. They hold until the first entry of the schedule.
        schedule: further weights, as (first sample, weights); samples are counted from the beginning of the run.
        stop: when an epoch ends: "first_exhausted", when a sample of a source without further ones would come;
            "all_exhausted", when each source was read through, while smaller ones begin again; "repeat", after
            `num_samples` samples, from where the next epoch goes on, so that sources have epochs of their own.
        num_samples: samples of an epoch, with "repeat".
        seed: from which the order within the sources is drawn.
        shuffle: False reads every source from its first sample to its last one.

    Raises:
        SettingError: a weight is negative, all are 0, one is for an unknown source, the schedule is out of order, or
            `num_samples` is not given with "repeat".
        DataError: a source has no sample.
        UnknownKind: the sources are not a dict, or one has no indices.

    Example:
        >>> mixture = MixtureDataset({"code": "abc", "text": "xy"}, {"code": 2, "text": 1}, shuffle=False)
        >>> "".join(mixture), len(mixture)
        ('axbcy', 5)
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Weights | None = None,
        schedule: Schedule = (),
        stop: StopWhen = "first_exhausted",
        num_samples: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        super().__init__(sources, weights, schedule, stop)
        self.seed, self.shuffle, self.num_samples = seed, shuffle, num_samples
        self._sizes = [_size(name, source) for name, source in zip(self._names, self._sources, strict=True)]
        self._batched = any(hasattr(source, "__getitems__") for source in self._sources)
        if (stop == "repeat") != (num_samples is not None) or (num_samples is not None and num_samples < 1):
            raise SettingError(
                f"Cannot end the epochs of a mixture with stop={stop!r} and num_samples={num_samples}.",
                "An epoch that repeats its sources has num_samples samples, at least 1; others end with their sources.",
                'Give num_samples with stop="repeat", and with it alone.',
            )
        self.epoch = self._first = self._drawn = 0
        self._measure()

    def _begin(self, epoch: int) -> None:
        """Go to an epoch, under the present schedule."""
        self.epoch, self._first, self._drawn = epoch, self._start(epoch), 0
        self._measure()

    def _start(self, epoch: int) -> int:
        """The first sample of an epoch, counted from the beginning of the run."""
        known = self.epoch if epoch >= self.epoch else 0
        first = self._first if known else 0
        for _ in range(known, epoch):
            first = self._end(first)
        return first

    def _measure(self) -> None:
        """Compute where the epoch ends, and forget the orders of the one before."""
        self._length = self._end(self._first) - self._first
        repeats = self.stop == "repeat"
        self._before = [0] * len(self._names) if repeats else self._order.counts(self._first)
        self._prefixes = [f"{self.seed}/{0 if repeats else self.epoch}/{name}" for name in self._names]
        self._orders: list[tuple[int, Permutation] | None] = [None] * len(self._names)

    def _end(self, first: int) -> int:
        """The sample after the last one of the epoch that begins with a sample."""
        if self.num_samples is not None:
            return first + self.num_samples
        if self.stop == "first_exhausted":
            return self._order.first_exhausted(first, self._sizes)
        end = self._order.all_exhausted(first, self._sizes)
        if end is None:
            start, weights = self._schedule[-1]
            never = [name for name, weight in zip(self._names, weights, strict=True) if not weight]
            raise SettingError(
                'Cannot end an epoch with stop="all_exhausted".',
                f"From sample {start} on the weight of {' and '.join(never)} is 0, so that not all samples are read.",
                'Give every source a weight in the last entry of the schedule, or use stop="first_exhausted".',
            )
        return end

    def set_epoch(self, epoch: int) -> None:
        """Give the samples of epoch number `epoch`; prepared loaders call this."""
        if epoch != self.epoch:
            self._begin(epoch)

    def __len__(self) -> int:
        """Samples of this epoch."""
        return self._length

    def __getitem__(self, position: Any) -> Any:
        """The sample at a position of the epoch, or that of a (source, index) of `located`."""
        if type(position) is not tuple:
            if not 0 <= position < self._length:
                raise IndexError(f"There is no sample {position} in an epoch of {self._length}.")
            (position,) = self.located([position])
        source, index = position
        return self._sources[source][index]

    def __getitems__(self, positions: Sequence[Any]) -> list[Any]:
        """The samples at some positions; sources that read many samples at once do so."""
        if positions and type(positions[0]) is not tuple:
            if not 0 <= min(positions) <= max(positions) < self._length:
                raise IndexError(f"There are no samples {positions} in an epoch of {self._length}.")
            positions = self.located(positions)
        sources = self._sources
        if not self._batched:
            return [sources[source][index] for source, index in positions]
        samples: list[Any] = [None] * len(positions)
        for number, source in enumerate(sources):
            places = [place for place, (chosen, _) in enumerate(positions) if chosen == number]
            indices = [positions[place][1] for place in places]
            together = getattr(source, "__getitems__", None)
            read = together(indices) if places and together else [source[index] for index in indices]
            for place, sample in zip(places, read, strict=True):
                samples[place] = sample
        return samples

    def located(self, positions: Sequence[int]) -> list[tuple[int, int]]:
        """The (number of the source, index in it) of each of some positions of the epoch."""
        first, before, sizes, orders = self._first, self._before, self._sizes, self._orders
        self.read_until(max(positions, default=-1) + 1)
        found = []
        for source, given in self._order.located([first + position for position in positions]):
            done, place = divmod(given - before[source], sizes[source])
            order = orders[source]
            if order is None or order[0] != done:
                order = orders[source] = (done, Permutation(sizes[source], f"{self._prefixes[source]}/{done}"))
            found.append((source, order[1](place) if self.shuffle else place))
        return found

    def read_until(self, position: int) -> None:
        """Note that the samples of the epoch before a position are read, so that their weights do not change."""
        if position > self._drawn:
            self._drawn = position

    def set_weights(self, weights: Weights | None = None) -> int:
        """Let other weights hold from the first sample that no process has read yet; called on every process.

        What loaders have read ahead comes before it, so that no sample is repeated or left out. A prepared loader
        begins with a whole step, or with a whole batch where the main process reads for all. An epoch that ends with
        its sources keeps its length: there, the weights hold from the next epoch on. They are added to the schedule,
        and saved with it; its later entries still come. DataLoader workers of a loader that is not prepared receive the
        weights when they start again.

        Args:
            weights: those of the main process count; the others may leave them out.

        Returns:
            The first sample with these weights, counted from the beginning of the run.

        Raises:
            SettingError: on every process: a weight is negative, all are 0, or one is for an unknown source.
            CollectiveError: a process did not come in time.

        Example:
            >>> mixture = MixtureDataset({"code": "abc", "text": "xyz"}, {"code": 1}, (), "repeat", 6, shuffle=False)
            >>> [mixture[0], mixture[1], mixture.set_weights({"text": 1}), mixture[2], mixture[3]]
            ['a', 'b', 2, 'x', 'y']
        """
        epoch = self._drawn if self.stop == "repeat" else self._length if self._drawn else 0
        read = self._first + epoch
        process = current.process_or_none()
        if process is None or process.world_size == 1:
            start, integers = read, self._integers(weights or {})
        else:
            failed = "Cannot change the weights of a mixture."
            barrier = StoreBarrier(process, "mixture", failed, _DEADLINE)
            with barrier.reporting():
                own = self._integers(weights or {}) if process.rank == 0 else None
            start, integers = json.loads(barrier.wait("weights", json.dumps([read, own]), _announced, last=True))
        self._plan([*self._schedule, (start, integers)])
        self._measure()
        return start

    def resolved(self, batches: BatchSampler) -> ResolvedBatches:
        """The batches of a prepared loader, which are positions, as (source, index).

        Raises:
            Conflict: the loader shuffles.
        """
        if isinstance(getattr(batches, "sampler", None), RandomSampler):
            raise Conflict(
                "Cannot shuffle a mixture of data sets.",
                "Its order says which source gives which sample, and shuffles within each source.",
                "Leave out shuffle=True; give MixtureDataset another seed for another order.",
            )
        return ResolvedBatches(batches, self)

    def mixture_state(self) -> dict[str, Any]:
        """What the order of the samples depends on, in plain values; a prepared loader saves it with its position."""
        return {
            "sources": dict(zip(self._names, self._sizes, strict=True)),
            "schedule": self._schedule,
            **{name: getattr(self, name) for name in _FIXED},
        }

    def load_mixture_state(self, state: Mapping[str, Any] | None, epoch: int = 0, samples: int = 0) -> None:
        """Follow the schedule of `mixture_state`, from a position on.

        Args:
            state: what that gave; None of a loader that read no mixture.
            epoch: the epoch to go on in.
            samples: samples of it that all processes together have received.

        Raises:
            CheckpointError: it was saved with other sources, or in another order.
        """
        failed = "Cannot continue a mixture of data sets."
        if state is None:
            raise CheckpointError(
                failed,
                f"The data set of the saved loader was not a mixture; this one has {', '.join(self._names)}.",
                "Load the checkpoint with the data set that it was saved with, or begin a new run.",
            )
        saved, own = state["sources"], dict(zip(self._names, self._sizes, strict=True))
        for name in sorted({**saved, **own}):
            if saved.get(name) != own.get(name):
                then = "had no such source" if name not in saved else f"had {saved[name]} samples in it"
                now = "has none" if name not in own else f"has {own[name]}"
                raise CheckpointError(
                    failed,
                    f"Source {name!r}: the saved mixture {then}, this one {now}.",
                    "Give the sources that the run began with; to leave one out, give it the weight 0.",
                )
        for name in _FIXED:
            if state[name] != getattr(self, name):
                raise CheckpointError(
                    failed,
                    f"It was saved with {name}={state[name]!r}; this one has {name}={getattr(self, name)!r}.",
                    f"Make it with {name}={state[name]!r}.",
                )
        schedule = [(start, list(weights)) for start, weights in state["schedule"]]
        if schedule != self._schedule:
            logger.info("A mixture continues with the schedule that was saved, which differs from that of the script.")
        self._plan(schedule)
        self.epoch = 0
        self._begin(epoch)
        self._drawn = samples

    def counts(self, samples: int, epoch: int | None = None) -> dict[str, SourceCount]:
        """What each source has given since the beginning of the run.

        Args:
            samples: samples of the epoch that all processes together have received.
            epoch: number of the epoch; this one when None.

        Example:
            >>> mixture = MixtureDataset({"code": range(30), "text": range(5)}, {"code": 0.7, "text": 0.3})
            >>> mixture.counts(10)["text"]
            SourceCount(samples=3, epochs=0.6, asked=0.3, given=0.3)
        """
        total = samples + (self._first if epoch is None else self._start(epoch))
        rows = zip(self._names, self._sizes, self._order.counts(total), self._order.shares(total), strict=True)
        return {
            name: SourceCount(given, given / size, float(share / max(total, 1)), given / max(total, 1))
            for name, size, given, share in rows
        }


_FIXED: Final = ("stop", "num_samples", "seed", "shuffle")
"""What the order of the samples depends on beside the sources and their weights."""


def _announced(values: Sequence[str]) -> str:
    """The weights of rank 0, from the first sample on that no rank has read."""
    said = [json.loads(value) for value in values]
    return json.dumps([max(read for read, _ in said), said[0][1]])


def _size(name: str, source: Any) -> int:
    """Samples of a source with indices."""
    if isinstance(source, IterableDataset) or not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise UnknownKind(
            f"Cannot mix the source {name!r}, of type {type(source).__name__}.",
            "A mixture of data sets reads its sources by index, and this one lacks __getitem__ or __len__.",
            "Mix streams with MixtureStream, which cannot seek.",
        )
    size = len(source)
    if size < 1:
        raise DataError(
            f"Cannot mix the source {name!r}.", "It has no sample.", "Leave it out, or check what was filtered."
        )
    return size


class ResolvedBatches(BatchSampler):
    """Batches of positions in a mixture, as (source, index), since DataLoader workers do not receive changed weights.

    Args:
        batches: of positions.
        mixture: what they are positions in.
    """

    def __init__(self, batches: BatchSampler, mixture: MixtureDataset) -> None:
        self.batch_sampler = batches
        self.mixture = mixture
        self.batch_size = getattr(batches, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = batches.drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        shard, mixture = self.batch_sampler, self.mixture
        step, width = getattr(shard, "step_size", None), getattr(shard, "per_process", None)
        ahead = step - shard.process_index * width if step and width else 0  # type: ignore[attr-defined]
        for batch in shard:
            located = mixture.located(batch)
            # The other processes of this step follow the same schedule.
            mixture.read_until(batch[0] + ahead)
            yield located

    def __len__(self) -> int:
        return len(self.batch_sampler)

    @property
    def even_batches(self) -> bool:
        """That of the batches."""
        return bool(self.batch_sampler.even_batches)  # type: ignore[attr-defined]

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self.batch_sampler.even_batches = even  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "batch_sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


class MixtureStream(_Weighted, IterableDataset[Any]):
    """Several streams read as one: each gives its share of the samples, evenly spread.

    The order of the sources is that of `MixtureDataset`, but streams cannot seek: to continue in the middle of an
    epoch, all samples before are read again and dropped. Each process and DataLoader worker that reads for itself
    counts samples for itself, from the beginning of each epoch.

    Args:
        sources: streams (or other iterables that can be read more than once), by name.
        weights: see `MixtureDataset`.
        schedule: see `MixtureDataset`; samples are counted from the beginning of the epoch.
        stop: when an epoch ends: "first_exhausted", when a stream that has ended would be read; "all_exhausted", when
            each stream has ended once, while those that ended before begin again; "repeat", after `num_samples`.
        num_samples: samples of an epoch, with "repeat"; None does not end.

    Raises:
        SettingError: see `MixtureDataset`.
        UnknownKind: a source is not iterable.

    Example:
        >>> "".join(MixtureStream({"code": "abc", "text": "xy"}, {"code": 2, "text": 1}))
        'axbcy'
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Weights | None = None,
        schedule: Schedule = (),
        stop: StopWhen = "first_exhausted",
        num_samples: int | None = None,
    ) -> None:
        super().__init__(sources, weights, schedule, stop)
        self.num_samples = num_samples
        self._epoch = 0
        for name, source in zip(self._names, self._sources, strict=True):
            if not hasattr(source, "__iter__") or isinstance(source, Iterator):
                raise UnknownKind(
                    f"Cannot mix the source {name!r}, of type {type(source).__name__}.",
                    "It cannot be iterated more than once.",
                    "Give a torch.utils.data.IterableDataset, or an object whose __iter__ begins anew.",
                )
        if stop == "all_exhausted" and not all(self._schedule[-1][1]):
            never = self._names[self._schedule[-1][1].index(0)]
            raise SettingError(
                'Cannot end an epoch with stop="all_exhausted".',
                f"The last weight of {never!r} is 0, so that it may never end.",
                'Give every source a weight in the last entry of the schedule, or use stop="first_exhausted".',
            )
        logger.warning(
            "A mixture of streams (%s) cannot seek: after a resume the samples before are read again and dropped.",
            ", ".join(self._names),
        )

    def set_epoch(self, epoch: int) -> None:
        """Give the samples of epoch number `epoch`; streams with `set_epoch` receive it when they begin."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        passes = [0] * len(self._sources)
        opened: list[Iterator[Any] | None] = [None] * len(self._sources)
        left = set(range(len(self._sources)))
        for start in count(0, _CHUNK):
            end = start + _CHUNK if self.num_samples is None else min(start + _CHUNK, self.num_samples)
            for source, _ in self._order.located(range(start, end)):
                reader = opened[source]
                sample = _ENDED if reader is None else next(reader, _ENDED)
                if sample is _ENDED and reader is not None:
                    left.discard(source)
                    if self.stop == "first_exhausted" or (self.stop == "all_exhausted" and not left):
                        return
                if sample is _ENDED:
                    reader = opened[source] = self._open(source, passes[source])
                    passes[source] += 1
                    sample = next(reader, _ENDED)
                if sample is _ENDED:
                    raise DataError(
                        f"Cannot read the source {self._names[source]!r} of a mixture.",
                        "It has no sample.",
                        "Leave it out, or check what was filtered.",
                    )
                yield sample
            if end == self.num_samples:
                return

    def _open(self, source: int, done: int) -> Iterator[Any]:
        """Begin to read a source that was read `done` times in this epoch."""
        stream = self._sources[source]
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(self._epoch + done)
        return iter(stream)


_ENDED: Final = object()
