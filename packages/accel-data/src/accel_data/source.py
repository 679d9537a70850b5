"""Sources of the batches of prepared loaders, from any position: the interface, and map-style data sets."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any, Final, TypeVar

from torch.utils.data import BatchSampler, DataLoader

from accel_data.order import LastRNG, RNGState, can_replay, decided_by_epoch, upcoming_rng
from accel_data.progress import Position
from accel_data.sample_ids import IndexIds, as_list
from accel_data.seeding import SampleSeed, SeededSamples, TaggedBatches
from accel_data.sharding import BatchSamplerShard, Padding, UnbatchedSampler, batching_of, shortage
from accel_data.stateful import has_state, is_stateful, steps_in
from accel_data.workers import opened_with_workers
from accel_ops.rng import restore, snapshot

__all__ = (
    "READS_SAMPLE_IDS",
    "MapSource",
    "SelfContainedSource",
    "Source",
    "WrappedSource",
    "first_batches",
    "length_of",
    "loader_over",
    "opened",
    "rebuilt",
)

W = TypeVar("W", bound="WrappedSource")

READS_SAMPLE_IDS: Final[dict[str, Any]] = {"collate_fn": as_list, "pin_memory": False, "worker_init_fn": None}
"""Changes to a loader that reads sample ids in place of samples."""


class Source:
    """Yields the batches of a prepared loader, with facts about them.

    Positions are counted in samples of the global order, or in steps when `counts_steps`. The defaults are for a source
    of one process without known length or order; subclasses override them.

    Attributes:
        base: the loader that reads the batches.
        last_rng: the random state that determined the order of the epoch begun last.
    """

    base: DataLoader[Any]
    last_rng: LastRNG

    @property
    def sample_seed(self) -> SampleSeed | None:
        """The seed of the samples, if they are seeded."""
        return None

    @property
    def processes(self) -> int:
        """Number of processes."""
        return 1

    @property
    def index(self) -> int:
        """Index of this process."""
        return 0

    @property
    def step_size(self) -> int | None:
        """Samples of all processes in one step; None when it varies."""
        return None

    @property
    def counts_steps(self) -> bool:
        """Whether positions are counted in steps."""
        return True

    @property
    def pads(self) -> bool:
        """Whether an incomplete last step is always padded."""
        return False

    @property
    def may_be_empty(self) -> bool:
        """Whether an epoch without batches is a normal result of the options."""
        return False

    def length(self) -> int | None:
        """Samples of an epoch of all processes together; None when unknown."""
        return None

    def remainder(self, start: int | None) -> int:
        """Real samples of an incomplete last step; 0 when it is complete, -1 when unknown or dropped."""
        return -1

    def shortage(self) -> str | None:
        """Why an epoch of this length has no samples for a process, or None."""
        return None

    def steps(self, at: Position | None) -> int | None:
        """Number of this process's steps from a position on, if the reported length is correct.

        None when no length is reported, or when the data set divides its samples among DataLoader workers itself.
        """
        return None

    def missing_from_len(self) -> int:
        """Number of batches that the base loader's length includes and this source skips."""
        return 0

    def open(self, at: Position | None = None, replay: RNGState | None = None) -> Iterator[Any]:
        """Begin an epoch.

        Args:
            at: position at which to begin; None begins after the skipped steps.
            replay: the random state that determines the order; the samplers draw a new one when None.
        """
        raise NotImplementedError

    def apart(self) -> Source:
        """A source of the same batches that does not move the position of a stream that has one."""
        return self

    @property
    def padded(self) -> Collection[int]:
        """Numbers of the batches for which `padding` returns a value; grows while the epoch is read."""
        return ()

    def padding(self, number: int) -> Padding | None:
        """Padding of batch `number`, counted since the epoch was opened; None when batches contain it themselves."""
        return None

    def upcoming_rng(self, restored: RNGState | None = None) -> RNGState | None:
        """The random state of the next epoch, or None if unknown; samplers are set to `restored` first, if given."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the epoch to the data set and the samplers."""

    def skipping(self, steps: int) -> Source:
        """A source whose epochs begin `steps` steps later."""
        raise NotImplementedError

    def skipped(self) -> tuple[int, int | None]:
        """Steps and samples by which all epochs begin later."""
        return 0, 0

    def sample_ids(self) -> Iterable[Any] | None:
        """Ids of all samples, as in `with_sample_ids`; None when they are unknown before the epoch is read."""
        return None

    def with_sample_ids(self, own: bool = False) -> Source:
        """A source that yields sample ids in place of samples, and lists in place of batches.

        Args:
            own: whether this process reads different data, so that its positions are not valid on other processes.
        """
        raise NotImplementedError

    @property
    def continues_from_base(self) -> bool:
        """Whether torchdata resumes an epoch by itself, because the data set has a `state_dict`."""
        return False

    @property
    def self_contained(self) -> bool:
        """Whether torchdata's state describes a position completely."""
        return False

    @property
    def has_base_state(self) -> bool:
        """Whether the loader that reads the batches is torchdata's."""
        return False

    def base_state(self) -> dict[str, Any] | None:
        """torchdata's state after the last yielded batch; None if the loader is not torchdata's."""
        return None

    def identity(self) -> str:
        """Description of the samplers or the stream that determine the order, for messages."""
        raise NotImplementedError

    def obstacle(self) -> str | None:
        """Why an epoch cannot be continued in its middle, or None."""
        return None

    def obstacle_to_counting(self) -> str | None:
        """Why an epoch cannot be continued from a number of batches only, or None."""
        return None


class WrappedSource(Source):
    """A source that forwards all methods to another one; subclasses override some.

    Args:
        inner: the other source.
    """

    def __init__(self, inner: Source) -> None:
        self.inner = inner
        self.base = inner.base
        self.last_rng = inner.last_rng

    def over(self: W, inner: Source) -> W:
        """A copy of this source that wraps another one."""
        other = copy.copy(self)
        other.inner, other.base, other.last_rng = inner, inner.base, inner.last_rng
        return other

    @property
    def sample_seed(self) -> SampleSeed | None:
        """See `Source`."""
        return self.inner.sample_seed

    @property
    def processes(self) -> int:
        """See `Source`."""
        return self.inner.processes

    @property
    def index(self) -> int:
        """See `Source`."""
        return self.inner.index

    @property
    def step_size(self) -> int | None:
        """See `Source`."""
        return self.inner.step_size

    @property
    def counts_steps(self) -> bool:
        """See `Source`."""
        return self.inner.counts_steps

    @property
    def pads(self) -> bool:
        """See `Source`."""
        return self.inner.pads

    @property
    def may_be_empty(self) -> bool:
        """See `Source`."""
        return self.inner.may_be_empty

    def length(self) -> int | None:
        """See `Source`."""
        return self.inner.length()

    def remainder(self, start: int | None) -> int:
        """See `Source`."""
        return self.inner.remainder(start)

    def shortage(self) -> str | None:
        """See `Source`."""
        return self.inner.shortage()

    def steps(self, at: Position | None) -> int | None:
        """See `Source`."""
        return self.inner.steps(at)

    def missing_from_len(self) -> int:
        """See `Source`."""
        return self.inner.missing_from_len()

    def open(self, at: Position | None = None, replay: RNGState | None = None) -> Iterator[Any]:
        """See `Source`."""
        return self.inner.open(at, replay)

    def apart(self) -> Source:
        """See `Source`."""
        return self.over(self.inner.apart())

    @property
    def padded(self) -> Collection[int]:
        """See `Source`."""
        return self.inner.padded

    def padding(self, number: int) -> Padding | None:
        """See `Source`."""
        return self.inner.padding(number)

    def upcoming_rng(self, restored: RNGState | None = None) -> RNGState | None:
        """See `Source`."""
        return self.inner.upcoming_rng(restored)

    def set_epoch(self, epoch: int) -> None:
        """See `Source`."""
        self.inner.set_epoch(epoch)

    def skipping(self, steps: int) -> Source:
        """See `Source`."""
        return self.over(self.inner.skipping(steps))

    def skipped(self) -> tuple[int, int | None]:
        """See `Source`."""
        return self.inner.skipped()

    def sample_ids(self) -> Iterable[Any] | None:
        """See `Source`."""
        return self.inner.sample_ids()

    def with_sample_ids(self, own: bool = False) -> Source:
        """See `Source`."""
        return self.over(self.inner.with_sample_ids(own))

    @property
    def continues_from_base(self) -> bool:
        """See `Source`."""
        return self.inner.continues_from_base

    @property
    def self_contained(self) -> bool:
        """See `Source`."""
        return self.inner.self_contained

    @property
    def has_base_state(self) -> bool:
        """See `Source`."""
        return self.inner.has_base_state

    def base_state(self) -> dict[str, Any] | None:
        """See `Source`."""
        return self.inner.base_state()

    def identity(self) -> str:
        """See `Source`."""
        return self.inner.identity()

    def obstacle(self) -> str | None:
        """See `Source`."""
        return self.inner.obstacle()

    def obstacle_to_counting(self) -> str | None:
        """See `Source`."""
        return self.inner.obstacle_to_counting()


class MapSource(Source):
    """Batches of a map-style data set.

    Args:
        base: the loader that reads them; its (batch) sampler is, or wraps, `shard`.
        shard: this process's batches of indices.
        sample_seed: the seed of the samples, if they are seeded.
    """

    def __init__(self, base: DataLoader[Any], shard: BatchSamplerShard, sample_seed: SampleSeed | None = None) -> None:
        self.base = base
        self.shard = shard
        self.last_rng = shard.last_rng
        self._sample_seed = sample_seed
        self._has_base_state = is_stateful(base)
        self._continues = has_state(base)
        self._epoch = 0
        # The loader and shard of the epoch that was opened last.
        self._reading: tuple[DataLoader[Any], BatchSamplerShard] = base, shard
        self._unseen = 0

    @classmethod
    def reading(
        cls, base: DataLoader[Any], shard: BatchSamplerShard, sample_seed: SampleSeed | None = None, **changes: Any
    ) -> MapSource:
        """A source that reads through a loader like `base`, with this process's shard as its (batch) sampler.

        Args:
            base: the loader.
            shard: this process's batches of indices.
            sample_seed: the seed of the samples, if they are seeded.
            changes: other attributes of the loader.
        """
        return cls(loader_over(base, shard, sample_seed, **changes), shard, sample_seed)

    @property
    def single(self) -> bool:
        """Whether the loader yields single samples."""
        return batching_of(self.base) is None

    @property
    def sample_seed(self) -> SampleSeed | None:
        """See `Source`."""
        return self._sample_seed

    @property
    def processes(self) -> int:
        """See `Source`."""
        return self.shard.num_processes

    @property
    def index(self) -> int:
        """See `Source`."""
        return self.shard.process_index

    @property
    def step_size(self) -> int | None:
        """See `Source`."""
        return None if self.shard.has_custom_batches else self.shard.step_size

    @property
    def counts_steps(self) -> bool:
        """See `Source`."""
        return self.shard.has_custom_batches

    @property
    def pads(self) -> bool:
        """See `Source`."""
        return self.shard.pads and not self.shard.has_custom_batches

    @property
    def may_be_empty(self) -> bool:
        """True: `shortage` was checked before."""
        return True

    def length(self) -> int | None:
        """See `Source`."""
        if not self.shard.has_custom_batches:
            return length_of(self.shard.sampler)
        return length_of(self.base.dataset)

    def remainder(self, start: int | None) -> int:
        """See `Source`."""
        length, size = self.length(), self.shard.step_size
        if length is None or not size or self.shard.drop_last:
            return -1
        return max(length - (start or 0), 0) % size

    def shortage(self) -> str | None:
        """See `Source`."""
        shard = self.shard
        return shortage(self.length(), shard.num_processes, shard.pads and not shard.drop_last)

    def steps(self, at: Position | None) -> int | None:
        """See `Source`."""
        shard = self.shard
        if not shard.has_custom_batches:
            length = length_of(shard.sampler)
            return None if length is None else len(shard.plan(length, None if at is None else at.samples))
        # Only when batches are read and split is it known whether one has no sample for a process.
        if length_of(shard.batch_sampler) is None or (shard.split_batches and not shard.pads):
            return None
        return max(shard.steps_of_custom_batches() - (shard.skipped_steps if at is None else at.steps), 0)

    def open(self, at: Position | None = None, replay: RNGState | None = None) -> Iterator[Any]:
        """See `Source`."""
        self._unseen = 0
        self._reading = self.base, self.shard
        if at is None and replay is None:
            return opened(self.base, self._epoch)
        shard, base_state = self.shard, None if at is None else at.base
        position = None if at is None else at.steps if shard.has_custom_batches else at.samples
        if at is not None and base_state is not None:
            # torchdata restores the data set's state and skips the indices of these batches.
            self._unseen = steps_in(base_state) or 0
            before = at.steps - self._unseen
            position = before if shard.has_custom_batches else before * (shard.step_size or 1)
        shard = shard.starting(position, replay)
        base = MapSource.reading(self.base, shard, self._sample_seed).base
        if base_state is not None:
            base.load_state_dict(base_state)  # type: ignore[attr-defined]
        self._reading = base, shard
        return opened(base, self._epoch)

    @property
    def padded(self) -> Collection[int]:
        """See `Source`."""
        return self._reading[1].padded

    def padding(self, number: int) -> Padding | None:
        """See `Source`."""
        padding = self._reading[1].padded.get(number + self._unseen)
        if padding is None or not self.single:
            return padding
        return padding.of_single()

    def upcoming_rng(self, restored: RNGState | None = None) -> RNGState | None:
        """See `Source`."""
        custom = self.shard.batch_sampler if self.shard.has_custom_batches else None
        return upcoming_rng(custom, self.shard.sampler, restored)

    def set_epoch(self, epoch: int) -> None:
        """See `Source`."""
        self._epoch = epoch
        if self._sample_seed is not None:
            self._sample_seed.epoch = epoch
        for holder in (self.base.dataset, self.shard.batch_sampler, self.shard.sampler):
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)

    def skipping(self, steps: int) -> MapSource:
        """See `Source`."""
        return self.reading(self.base, self.shard.skipping(steps), self._sample_seed)

    def skipped(self) -> tuple[int, int | None]:
        """See `Source`."""
        steps, size = self.shard.skipped_steps, self.step_size
        return steps, None if size is None else steps * size

    def sample_ids(self) -> Iterable[Any] | None:
        """See `Source`."""
        length = length_of(self.base.dataset)
        return None if length is None else range(length)

    def with_sample_ids(self, own: bool = False) -> MapSource:
        """See `Source`."""
        shard = self.shard.skipping(0)
        return MapSource.reading(self.base, shard, dataset=IndexIds(self.base.dataset), **READS_SAMPLE_IDS)

    @property
    def continues_from_base(self) -> bool:
        """See `Source`."""
        return self._continues

    @property
    def has_base_state(self) -> bool:
        """See `Source`."""
        return self._has_base_state

    def base_state(self) -> dict[str, Any] | None:
        """See `Source`."""
        base: Any = self._reading[0]
        return base.state_dict() if self._has_base_state else None

    def identity(self) -> str:
        """See `Source`."""
        classes = (type(part) for part in (self.shard.batch_sampler, self.shard.sampler) if part is not None)
        return " over ".join(f"{known.__module__}.{known.__qualname__}" for known in classes)

    def obstacle(self) -> str | None:
        """See `Source`."""
        if can_replay(self.shard.batch_sampler if self.shard.has_custom_batches else None, self.shard.sampler):
            return None
        return f"The order of {self.identity()} cannot be replayed: it has neither a generator nor a state_dict()."

    def obstacle_to_counting(self) -> str | None:
        """See `Source`."""
        if not self.shard.has_custom_batches and decided_by_epoch(self.shard.sampler):
            return None
        return f"It does not contain the random state of the order of {self.identity()}."


class SelfContainedSource(MapSource):
    """Batches of an unchanged torchdata loader, whose state contains the position and the order.

    Args:
        base: the loader, over a map-style data set.
    """

    def __init__(self, base: DataLoader[Any]) -> None:
        super().__init__(base, BatchSamplerShard(batching_of(base) or BatchSampler(base.sampler, 1, False)))

    @property
    def counts_steps(self) -> bool:
        """True: torchdata counts batches."""
        return True

    def steps(self, at: Position | None) -> int | None:
        """See `Source`."""
        return super().steps(None) if at is None else None

    def open(self, at: Position | None = None, replay: RNGState | None = None) -> Iterator[Any]:
        """See `Source`."""
        if at is not None and at.base is not None:
            self.base.load_state_dict(at.base)  # type: ignore[attr-defined]
            return opened(self.base, self._epoch)
        # Skipped batches are read too, because torchdata counts what it reads.
        skipped = self.shard.skipped_steps if at is None else at.steps
        batches = opened(self.base, self._epoch)
        return islice(batches, skipped, None) if skipped else batches

    def skipping(self, steps: int) -> SelfContainedSource:
        """See `Source`."""
        other = copy.copy(self)
        other.shard = self.shard.skipping(steps)
        return other

    def missing_from_len(self) -> int:
        """See `Source`."""
        return self.shard.skipped_steps

    @property
    def continues_from_base(self) -> bool:
        """True."""
        return True

    @property
    def self_contained(self) -> bool:
        """True."""
        return True

    def obstacle_to_counting(self) -> str | None:
        """None: torchdata's state contains that of the samplers."""
        return None


def first_batches(source: Source, count: int, replay: RNGState | None) -> tuple[list[Any], RNGState | None]:
    """The first batches of an epoch that will be opened at a later position.

    Args:
        source: the epoch's source.
        count: number of batches; fewer are returned if the epoch is shorter.
        replay: the random state from which the epoch begins, or None.

    Returns:
        The batches, and the random state with which to open the epoch, so that it has the order of these batches.
    """
    generators = snapshot()
    first = list(islice(source.apart().open(Position(epoch=0, steps=0, samples=0), replay), count))
    restore(generators)
    drawn = source.last_rng.state
    # A seed drawn from the process's generator is drawn again when the epoch is opened.
    return first, replay or (None if drawn is None or drawn.kind == "seed" else drawn)


def length_of(source: Any) -> int | None:
    """The result of `len`, or None if there is no length."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def loader_over(
    base: DataLoader[Any], batches: BatchSampler, sample_seed: SampleSeed | None = None, **changes: Any
) -> DataLoader[Any]:
    """A copy of a loader that reads other batches of indices.

    Args:
        base: the loader.
        batches: yields batches of indices.
        sample_seed: the seed of the samples, if they are seeded.
        changes: other attributes of the loader.
    """
    resolved = None if "dataset" in changes else getattr(base.dataset, "resolved", None)
    indices: Any = batches if resolved is None else resolved(batches)
    indices = indices if sample_seed is None else TaggedBatches(indices, sample_seed)
    name = "sampler" if base.batch_sampler is None else "batch_sampler"
    changes[name] = UnbatchedSampler(indices) if batching_of(base) is None else indices
    if sample_seed is not None and not isinstance(base.dataset, SeededSamples):
        changes["dataset"] = SeededSamples.of(base.dataset)
    return rebuilt(base, **changes)


def rebuilt(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A loader of the same class and with the same attributes, except for the changes.

    Torch does not allow the sampler of an existing loader to change, so this creates a new loader without workers yet.
    """
    other = copy.copy(loader)
    vars(other).update(changes, _iterator=None)
    return other


def opened(loader: DataLoader[Any], epoch: int) -> Iterator[Any]:
    """Begin to read epoch number `epoch` through a loader."""
    return opened_with_workers(loader, epoch) if loader.num_workers else iter(loader)
