"""Mixtures: several data sets read as one, with a weight for each."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from itertools import count, pairwise
from numbers import Real
from typing import Any, Final, Literal, get_args

from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler

from accel_data.interleave import Interleaving, Permutation
from accel_data.sharding import MappedBatches
from accel_ops.agreement import StoreBarrier
from accel_state import current
from accel_state.errors import CheckpointError, Conflict, DataError, SettingError, UnknownKind
from accel_state.settings.integers import as_int
from accel_state.settings.schema import closest

__all__ = ("MixtureDataset", "MixtureStream", "SourceCount", "StopWhen")

logger = logging.getLogger(__name__)

StopWhen = Literal["first_exhausted", "all_exhausted", "repeat"]
"""When an epoch of a mixture ends."""

Weights = Mapping[str, Any]
Schedule = Sequence[tuple[int, Weights]]

_AGREEMENT_TIMEOUT_S: Final = 600.0
_CHUNK_SAMPLES: Final = 256


@dataclass(frozen=True)
class SourceCount:
    """The samples that one source of a mixture has given.

    Args:
        samples: the number of samples.
        epochs: passes over the source, including the fraction of the current pass.
        target_share: its share of all samples so far, by the weights.
        share: its actual share.
    """

    samples: int
    epochs: float
    target_share: float
    share: float


class _Weighted:
    """The sources of a mixture by name, and the order in which they are read."""

    def __init__(self, sources: Mapping[str, Any], weights: Weights | None, schedule: Schedule, stop: StopWhen) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise UnknownKind(
                "Cannot create a mixture of data sets.",
                f"The sources must be a dict of at least one data set, and are {sources!r}.",
                'Give the data sets by name: {"code": a, "text": b}.',
            )
        if stop not in get_args(StopWhen):
            raise SettingError(
                f"Cannot create a mixture with stop={stop!r}.",
                f"The value must be one of {', '.join(get_args(StopWhen))}.",
                "Remove it to end an epoch when the first source is exhausted.",
            )
        self.stop = stop
        # The order of names in the dict has no effect, so a resumed script may have another order.
        self._names = sorted(sources)
        self._sources = [sources[name] for name in self._names]
        self._plan(self._checked(weights, schedule))

    def _checked(self, weights: Weights | None, schedule: Schedule) -> list[tuple[int, list[int]]]:
        """The schedule from sample 0 on, in integer weights."""
        initial = [(0, weights)] if weights is not None else []
        starts = [start for entry, _ in schedule if (start := as_int(entry)) is not None and start >= 0]
        if len(starts) < len(schedule) or any(later <= start for start, later in pairwise(starts)):
            raise SettingError(
                f"Cannot use a schedule that begins at the samples {', '.join(str(entry) for entry, _ in schedule)}.",
                "Each entry must begin at a later sample than the previous one; samples are integers of at least 0.",
                "Sort the entries by their first sample, with one entry for each.",
            )
        if not initial and (not starts or starts[0] > 0):
            raise SettingError(
                "Cannot mix the sources " + ", ".join(self._names) + ".",
                "No weights are given for sample 0.",
                "Give weights={...}, or let the schedule begin at sample 0.",
            )
        changes = [(start, each) for start, (_, each) in zip(starts, schedule, strict=True)]
        return [(start, self._integers(each)) for start, each in (*initial, *changes)]

    def _integers(self, weights: Weights) -> list[int]:
        """Weights in the order of the sources, as integers without a common divisor; a source without one has 0."""
        failure = f"Cannot mix the sources {', '.join(self._names)} with the weights {weights!r}."
        if not isinstance(weights, Mapping):
            raise UnknownKind(
                failure, "The weights are not a dict.", 'Give them by source: {"code": 0.7, "text": 0.3}.'
            )
        unknown = next((name for name in weights if name not in self._names), None)
        if unknown is not None:
            near = closest(str(unknown), self._names)
            raise SettingError(
                failure,
                f"There is no source {unknown!r}.",
                f"Did you mean {near!r}?" if near else f"Give weights only to {', '.join(self._names)}.",
            )
        exact = [_exact(weights.get(name, 0), name, failure) for name in self._names]
        if not any(exact):
            raise SettingError(
                failure,
                f"All weights are 0, so neither {' nor '.join(self._names)} would be read.",
                "Give at least one source a weight above 0.",
            )
        scale = math.lcm(*(weight.denominator for weight in exact))
        integers = [int(weight * scale) for weight in exact]
        return [weight // math.gcd(*integers) for weight in integers]

    def _plan(self, schedule: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Follow a schedule that begins at sample 0."""
        # Of two entries at one sample, the later one applies.
        self._schedule = sorted({start: list(weights) for start, weights in schedule}.items())
        self._order = Interleaving(self._schedule[0][1])
        for start, weights in self._schedule[1:]:
            self._order.change(start, weights)

    @property
    def schedule(self) -> list[tuple[int, dict[str, Fraction]]]:
        """The weights by first sample, including those of `set_weights`; the weights of an entry add up to 1."""
        return [
            (start, {name: Fraction(weight, sum(weights)) for name, weight in zip(self._names, weights, strict=True)})
            for start, weights in self._schedule
        ]


def _exact(weight: Any, name: str, failure: str) -> Fraction:
    """A weight as a fraction; a float counts as the decimal number of its repr."""
    if isinstance(weight, bool) or not isinstance(weight, (Real, Decimal)):
        raise UnknownKind(
            failure,
            f"The weight of {name!r} is of type {type(weight).__name__}.",
            "Give a number, or a fractions.Fraction for an exact ratio.",
        )
    if not math.isfinite(weight) or weight < 0:
        raise SettingError(
            failure,
            f"The weight of {name!r} is {weight}.",
            "Give a finite number of at least 0; 0 excludes the source.",
        )
    return Fraction(str(weight))


class MixtureDataset(_Weighted, Dataset[Any]):
    """Several map-style data sets read as one, interleaved evenly by weight.

    The source of sample n is computed by arithmetic, so seeking to any position is immediate. At every prefix, each
    source is within K samples of its share, where K is the number of sources (`accel_data.interleave` has the proof;
    with two sources it is half a sample). Each pass over a source is shuffled anew, by the seed, the name of the source
    and the number of the pass.

    Read it in order: `DataLoader(mixture, batch_size=8)`, without `shuffle=True`. A prepared loader saves the schedule
        with its position, and continues on any number of processes and workers.

    Args:
        sources: data sets with `__getitem__` and `__len__`, by name.
        weights: weights of the sources, by name; a source without a weight has 0. They need not add up to 1. Floats
            count as the decimal numbers of their repr. They apply until the first entry of the schedule.
        schedule: further weights, as (first sample, weights); samples are counted from the beginning of the run.
        stop: when an epoch ends. "first_exhausted": when the next sample is from a source that has been read
            completely. "all_exhausted": when each source has been read completely; smaller ones are repeated. "repeat":
            after `num_samples` samples; the next epoch continues from there, so sources have independent epochs.
        num_samples: samples of an epoch, with "repeat".
        seed: seed of the order within the sources.
        shuffle: False reads every source in its own order.

    Raises:
        SettingError: a weight is negative or for an unknown source, all are 0, the schedule is out of order, or
            `num_samples` is missing with "repeat".
        DataError: a source has no samples.
        UnknownKind: the sources are not a dict, or one is not a map-style data set.

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
                "stop='repeat' needs num_samples of at least 1, and the other values of stop do not use it.",
                'Give num_samples only with stop="repeat".',
            )
        self.epoch = self._first = self._drawn = 0
        self._measure()

    def _begin(self, epoch: int) -> None:
        """Set the epoch, under the current schedule."""
        self.epoch, self._first, self._drawn = epoch, self._start(epoch), 0
        self._measure()

    def _start(self, epoch: int) -> int:
        """The first sample of an epoch, counted from the beginning of the run."""
        begun = self.epoch if epoch >= self.epoch else 0
        first = self._first if begun else 0
        for _ in range(begun, epoch):
            first = self._end(first)
        return first

    def _measure(self) -> None:
        """Compute the end of the epoch, and drop the orders of the previous one."""
        self._length = self._end(self._first) - self._first
        repeats = self.stop == "repeat"
        self._before = [0] * len(self._names) if repeats else self._order.counts(self._first)
        self._prefixes = [f"{self.seed}/{0 if repeats else self.epoch}/{name}" for name in self._names]
        self._orders: list[tuple[int, Permutation] | None] = [None] * len(self._names)

    def _end(self, first: int) -> int:
        """The end of the epoch that begins with a sample: the sample after its last one."""
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
                f"From sample {start} on the weight of {' and '.join(never)} is 0, so not all samples would be read.",
                'Give every source a weight in the last entry of the schedule, or use stop="first_exhausted".',
            )
        return end

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; prepared loaders call this."""
        if epoch != self.epoch:
            self._begin(epoch)

    def __len__(self) -> int:
        """Samples of this epoch."""
        return self._length

    def __getitem__(self, position: Any) -> Any:
        """The sample at a position of the epoch, or at a (source, index) of `located`."""
        if type(position) is not tuple:
            if not 0 <= position < self._length:
                raise IndexError(f"There is no sample {position} in an epoch of {self._length}.")
            (position,) = self.located([position])
        source, index = position
        return self._sources[source][index]

    def __getitems__(self, positions: Sequence[Any]) -> list[Any]:
        """The samples at several positions, with `__getitems__` of sources that have it."""
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
        """The (number of the source, index in it) of each position."""
        first, before, sizes, orders = self._first, self._before, self._sizes, self._orders
        self.read_until(max(positions, default=-1) + 1)
        places = []
        for source, number in self._order.located([first + position for position in positions]):
            done, place = divmod(number - before[source], sizes[source])
            order = orders[source]
            if order is None or order[0] != done:
                order = orders[source] = (done, Permutation(sizes[source], f"{self._prefixes[source]}/{done}"))
            places.append((source, order[1](place) if self.shuffle else place))
        return places

    def read_until(self, position: int) -> None:
        """Mark the samples of the epoch before a position as read, so that their weights do not change."""
        if position > self._drawn:
            self._drawn = position

    def set_weights(self, weights: Weights | None = None) -> int:
        """Use other weights from the first sample that no process has read yet; call it on every process.

        Prefetched samples come before it, so no sample is repeated or skipped. In a prepared loader the weights begin
        at a whole step, or at a whole batch if the main process reads for all. An epoch whose length depends on its
        sources keeps its length, and the weights apply from the next epoch on. They are added to the schedule and saved
        with it; later entries of the schedule still apply. DataLoader workers of an unprepared loader receive the
        weights when they restart.

        Args:
            weights: the new weights. Those of the main process are used; other processes may omit them.

        Returns:
            The first sample with these weights, counted from the beginning of the run.

        Raises:
            SettingError: a weight is negative or for an unknown source, or all are 0; raised on every process.
            CollectiveError: a process did not call it in time.

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
            failure = "Cannot change the weights of a mixture."
            barrier = StoreBarrier(process, "mixture", failure, _AGREEMENT_TIMEOUT_S)
            with barrier.reporting():
                own = self._integers(weights or {}) if process.rank == 0 else None
            start, integers = json.loads(barrier.wait("weights", json.dumps([read, own]), _announced, last=True))
        self._plan([*self._schedule, (start, integers)])
        self._measure()
        return start

    def resolved(self, batches: BatchSampler) -> MappedBatches:
        """The batches of a prepared loader, which are positions, as (source, index).

        They are resolved here, since DataLoader workers do not receive changed weights.

        Raises:
            Conflict: the loader shuffles.
        """
        if isinstance(getattr(batches, "sampler", None), RandomSampler):
            raise Conflict(
                "Cannot shuffle a mixture of data sets.",
                "A mixture determines the source of each sample itself, and shuffles within each source.",
                "Remove shuffle=True; give MixtureDataset another seed for another order.",
            )
        shard: Any = batches
        step, width = getattr(shard, "step_size", None), getattr(shard, "per_process", None)
        ahead = step - shard.process_index * width if step and width else 0
        return MappedBatches(batches, partial(self._resolve, ahead))

    def _resolve(self, ahead: int, batches: Iterator[list[int]]) -> Iterator[list[Any]]:
        """The batches as (source, index).

        Args:
            ahead: positions from the beginning of this process's batch to the end of the step.
            batches: batches of positions.
        """
        for batch in batches:
            located = self.located(batch)
            # The other processes of this step follow the same schedule.
            self.read_until(batch[0] + ahead)
            yield located

    def mixture_state(self) -> dict[str, Any]:
        """The state of the order as plain values; a prepared loader saves it with its position."""
        return {
            "sources": dict(zip(self._names, self._sizes, strict=True)),
            "schedule": self._schedule,
            **{name: getattr(self, name) for name in _FIXED_SETTINGS},
        }

    def load_mixture_state(self, state: Mapping[str, Any] | None, epoch: int = 0, samples: int = 0) -> None:
        """Continue with the schedule of `mixture_state`, from a position on.

        Args:
            state: the result of `mixture_state`; None for a loader without a mixture.
            epoch: the epoch to continue.
            samples: samples of the epoch that all processes together have received.

        Raises:
            CheckpointError: the state has other sources or another order.
        """
        failure = "Cannot continue a mixture of data sets."
        if state is None:
            raise CheckpointError(
                failure,
                f"The data set of the saved loader was not a mixture; this one has {', '.join(self._names)}.",
                "Use the data set with which the checkpoint was saved, or begin a new run.",
            )
        saved, own = state["sources"], dict(zip(self._names, self._sizes, strict=True))
        for name in sorted({**saved, **own}):
            if saved.get(name) != own.get(name):
                then = "had no such source" if name not in saved else f"had {saved[name]} samples in it"
                now = "has none" if name not in own else f"has {own[name]}"
                raise CheckpointError(
                    failure,
                    f"Source {name!r}: the saved mixture {then}, this one {now}.",
                    "Give the sources with which the run began; to exclude one, give it the weight 0.",
                )
        for name in _FIXED_SETTINGS:
            if state[name] != getattr(self, name):
                raise CheckpointError(
                    failure,
                    f"It was saved with {name}={state[name]!r}; this one has {name}={getattr(self, name)!r}.",
                    f"Create it with {name}={state[name]!r}.",
                )
        schedule = [(start, list(weights)) for start, weights in state["schedule"]]
        if schedule != self._schedule:
            logger.info("A mixture continues with the schedule that was saved, which differs from that of the script.")
        self._plan(schedule)
        self.epoch = 0
        self._begin(epoch)
        self._drawn = samples

    def counts(self, samples: int, epoch: int | None = None) -> dict[str, SourceCount]:
        """The samples that each source has given since the beginning of the run.

        Args:
            samples: samples of the epoch that all processes together have received.
            epoch: number of the epoch; None for the current one.

        Example:
            >>> mixture = MixtureDataset({"code": range(30), "text": range(5)}, {"code": 0.7, "text": 0.3})
            >>> mixture.counts(10)["text"]
            SourceCount(samples=3, epochs=0.6, target_share=0.3, share=0.3)
        """
        total = samples + (self._first if epoch is None else self._start(epoch))
        rows = zip(self._names, self._sizes, self._order.counts(total), self._order.shares(total), strict=True)
        return {
            name: SourceCount(count, count / size, float(share / max(total, 1)), count / max(total, 1))
            for name, size, count, share in rows
        }


_FIXED_SETTINGS: Final = ("stop", "num_samples", "seed", "shuffle")
"""Settings of the order besides the sources and their weights."""


def _announced(values: Sequence[str]) -> str:
    """The weights of rank 0, and the first sample that no rank has read."""
    said = [json.loads(value) for value in values]
    return json.dumps([max(read for read, _ in said), said[0][1]])


def _size(name: str, source: Any) -> int:
    """The number of samples of a map-style source."""
    if isinstance(source, IterableDataset) or not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise UnknownKind(
            f"Cannot mix the source {name!r}, of type {type(source).__name__}.",
            "A mixture of data sets reads its sources by index, but this one has no __getitem__ or no __len__.",
            "Use MixtureStream for streams.",
        )
    size = len(source)
    if size < 1:
        raise DataError(f"Cannot mix the source {name!r}.", "It has no samples.", "Remove it, or check its filters.")
    return size


class MixtureStream(_Weighted, IterableDataset[Any]):
    """Several streams read as one, interleaved evenly by weight.

    The order of the sources is that of `MixtureDataset`, but streams cannot seek: to continue in the middle of an
        epoch, all earlier samples are read again and dropped. Each process and DataLoader worker that reads separately
        also counts samples separately, from the beginning of each epoch.

    Args:
        sources: streams (or other iterables that can be read more than once), by name.
        weights: see `MixtureDataset`.
        schedule: see `MixtureDataset`; samples are counted from the beginning of the epoch.
        stop: when an epoch ends. "first_exhausted": when the next sample is from a stream that has ended.
            "all_exhausted": when each stream has ended once; streams that end earlier are repeated. "repeat": after
            `num_samples`.
        num_samples: samples of an epoch, with "repeat"; None never ends.

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
                    "Give a torch.utils.data.IterableDataset, or an object whose __iter__ starts from the beginning.",
                )
        if stop == "all_exhausted" and not all(self._schedule[-1][1]):
            never = self._names[self._schedule[-1][1].index(0)]
            raise SettingError(
                'Cannot end an epoch with stop="all_exhausted".',
                f"The last weight of {never!r} is 0, so it may never end.",
                'Give every source a weight in the last entry of the schedule, or use stop="first_exhausted".',
            )
        logger.warning(
            "A mixture of streams (%s) cannot seek: after a resume the earlier samples are read again and dropped.",
            ", ".join(self._names),
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; streams with `set_epoch` receive it when they begin."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        passes = [0] * len(self._sources)
        opened: list[Iterator[Any] | None] = [None] * len(self._sources)
        left = set(range(len(self._sources)))
        for start in count(0, _CHUNK_SAMPLES):
            end = start + _CHUNK_SAMPLES if self.num_samples is None else min(start + _CHUNK_SAMPLES, self.num_samples)
            for source, _ in self._order.located(range(start, end)):
                reader = opened[source]
                sample = _SOURCE_ENDED if reader is None else next(reader, _SOURCE_ENDED)
                if sample is _SOURCE_ENDED and reader is not None:
                    left.discard(source)
                    if self.stop == "first_exhausted" or (self.stop == "all_exhausted" and not left):
                        return
                if sample is _SOURCE_ENDED:
                    reader = opened[source] = self._open(source, passes[source])
                    passes[source] += 1
                    sample = next(reader, _SOURCE_ENDED)
                if sample is _SOURCE_ENDED:
                    raise DataError(
                        f"Cannot read the source {self._names[source]!r} of a mixture.",
                        "It has no samples.",
                        "Remove it, or check its filters.",
                    )
                yield sample
            if end == self.num_samples:
                return

    def _open(self, source: int, done: int) -> Iterator[Any]:
        """Start a new pass over a source that was read `done` times in this epoch."""
        stream = self._sources[source]
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(self._epoch + done)
        return iter(stream)


_SOURCE_ENDED: Final = object()
