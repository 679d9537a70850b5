"""Sources of the batches of prepared loaders, from any position: the interface, and map-style data sets."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Iterable, Iterator, MutableMapping
from itertools import islice
from typing import Any, Final, TypeVar, cast

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, get_worker_info

from accel_data.kept_iterators import keeps_iterator, reading_epochs, restart_kept_iterators
from accel_data.order import LastRNG, RNGState, can_replay, decided_by_epoch, is_stock, upcoming_rng
from accel_data.padding import PaddedBatch
from accel_data.progress import Position
from accel_data.seeding import SampleSeed, SeededSamples
from accel_data.sharding import (
    BatchSamplerShard,
    MappedBatches,
    Padding,
    UnbatchedSampler,
    batching_of,
    length_of,
    shortage,
)
from accel_data.stateful import has_state, is_stateful, steps_in
from accel_data.token_batches import TokenBatchSampler
from accel_data.workers import opened_with_workers
from accel_ops.objects import gather_object
from accel_ops.rng import restore, snapshot
from accel_state.errors import DataError

__all__ = (
    "READS_SAMPLE_IDS",
    "ContentHashIds",
    "IndexIds",
    "LocalSource",
    "MapSource",
    "PositionIds",
    "SelfContainedSource",
    "Source",
    "as_list",
    "first_batches",
    "loader_over",
    "opened",
    "rebuilt",
    "with_states",
)

# ---------------------------------------------------------------------- sample ids, to inspect the order of an epoch


class IndexIds(Dataset[int]):
    """A data set whose samples are their indices.

    Args:
        dataset: the data set with these indices.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return len(self.dataset)


class _StreamIds(IterableDataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on if the stream has `set_epoch`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset)


class PositionIds(_StreamIds):
    """A stream whose samples are "DataLoader worker:position".

    Args:
        dataset: the stream; it is read.
    """

    def __iter__(self) -> Iterator[str]:
        worker = get_worker_info()
        number = 0 if worker is None else worker.id
        return (f"{number}:{position}" for position, _ in enumerate(self.dataset))


class ContentHashIds(_StreamIds):
    """A stream whose samples are digests of their contents.

    Args:
        dataset: the stream; it is read.
    """

    def __iter__(self) -> Iterator[str]:
        return (hashlib.blake2b(pickle.dumps(sample), digest_size=16).hexdigest() for sample in self.dataset)


def as_list(samples: Any) -> Any:
    """A collate function that returns its batch unchanged."""
    return samples


# ---------------------------------------------------------------------- sources


S = TypeVar("S", bound="Source")

READS_SAMPLE_IDS: Final[dict[str, Any]] = {"collate_fn": as_list, "pin_memory": False, "worker_init_fn": None}
"""Changes to a loader that reads sample ids in place of samples."""


class Source:
    """Yields this process's batches of a prepared loader, with facts about the steps of an epoch.

    There is one class for each kind of loader (`accel_data.prepare.classify`). A `LocalSource` reads what its own
    loader yields; the other kinds make their steps from the batches of one. Positions are counted in samples of the
    global order, or in steps when `counts_steps`. The defaults are for a source without known length or order.

    Attributes:
        local: what this process reads, with the facts about its order; itself for a `LocalSource`.
        processes: number of processes that share the data.
        index: index of this process among them.
        step_size: samples of all processes in one step; None when it varies.
        counts_steps: whether positions are counted in steps.
        self_contained: whether torchdata's state describes a position completely.
    """

    local: LocalSource
    processes: int = 1
    index: int = 0
    step_size: int | None = None
    counts_steps: bool = True
    self_contained: bool = False

    @property
    def reads_here(self) -> bool:
        """Whether this process reads the data, and not another one for it."""
        return True

    @property
    def pads(self) -> bool:
        """Whether an incomplete last step is always padded."""
        return False

    @property
    def drops_last(self) -> bool:
        """Whether an incomplete last step is dropped."""
        return False

    @property
    def may_be_empty(self) -> bool:
        """Whether an epoch without batches is a normal result of the options."""
        return False

    @property
    def has_exact_length(self) -> bool:
        """Whether `length` is known by arithmetic, and not only reported by an object of the script."""
        return False

    def length(self) -> int | None:
        """Samples of an epoch of all processes together, as far as it is reported; None when unknown."""
        return None

    def steps(self) -> int:
        """Batches of this process in an epoch, by the reported length.

        Raises:
            TypeError: no length is reported.
        """
        return max(len(self.local.base) - self.skipped()[0], 0)

    def remainder(self, start: int | None) -> int:
        """Real samples of an incomplete last step by the length; -1 when unknown or dropped.

        0 when this process's last step is complete; without padding, others may have a batch after it.
        """
        length, size = self.length(), self.step_size
        if length is None or not size or self.drops_last:
            return -1
        tail = max(length - (start or 0), 0) % size
        return tail if self.pads or tail > self.index * size // self.processes else 0

    def shortage(self) -> str | None:
        """Why an epoch of the reported length has no samples for a process, or None."""
        return None

    def uneven_steps(self) -> tuple[int, int] | None:
        """Batches of the first and of the last process, if they are known to differ; None if all have as many."""
        return None

    def agree(self, start: int | None) -> tuple[int, str | None]:
        """`remainder` and `shortage` of an epoch that begins on all processes."""
        return self.remainder(start), self.shortage()

    def open(self, at: Position | None = None, replay: RNGState | None = None) -> Iterator[Any]:
        """Begin an epoch; yields batches, and `PaddedBatch` where a batch has padding or a state.

        Args:
            at: position at which to begin; None begins after the skipped steps.
            replay: the random state that determines the order; the samplers draw a new one when None.
        """
        raise NotImplementedError

    @property
    def padded(self) -> MutableMapping[int, Padding]:
        """Padding of batches of the epoch opened last that do not contain it, by number; grows while they are read."""
        return {}

    def over(self: S, local: LocalSource) -> S:
        """A copy of this source that reads through another local source."""
        other = copy.copy(self)
        other.local = local
        return other

    def skipping(self, steps: int) -> Source:
        """A source whose epochs begin `steps` steps later."""
        raise NotImplementedError

    def skipped(self) -> tuple[int, int | None]:
        """Steps and samples by which all epochs begin later."""
        return 0, 0

    def with_sample_ids(self) -> Source:
        """A source that yields sample ids in place of samples, and lists in place of batches."""
        raise NotImplementedError

    def base_state(self) -> dict[str, Any] | None:
        """torchdata's state after the last yielded batch; None if the loader is not torchdata's."""
        return self.local.base_state()

    def obstacle_to_counting(self) -> str | None:
        """Why an epoch cannot be continued from a number of batches only, or None."""
        return self.local.obstacle_to_counting()


class LocalSource(Source):
    """What one process reads through a loader, and the order of it.

    Attributes:
        base: the loader that reads the batches.
        last_rng: the random state that determined the order of the epoch begun last.
        sample_seed: the seed of the samples, if they are seeded.
        continues_from_base: whether torchdata resumes an epoch by itself, because the data set has a `state_dict`.
    """

    base: DataLoader[Any]
    last_rng: LastRNG
    sample_seed: SampleSeed | None = None
    continues_from_base: bool = False

    @property
    def local(self) -> LocalSource:  # type: ignore[override]
        """The source that reads on this process: this one."""
        return self

    def check_draws(self) -> None:
        """Compare what the processes have drawn, once, when the first batch of the first epoch was read.

        Raises:
            DataError: they have drawn differently; raised on all processes.
        """

    def apart(self) -> LocalSource:
        """A source of the same batches that does not move the position of a stream that has one."""
        return self

    def upcoming_rng(self, restored: RNGState | None = None) -> RNGState | None:
        """The random state of the next epoch, or None if unknown; samplers are set to `restored` first, if given."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the epoch to the data set and the samplers."""

    def redivided(self, rng_state: RNGState | None, steps: int, processes: int) -> RNGState | None:
        """The random state to continue from after some steps on another number of processes.

        None if that is not possible.
        """
        return None

    def skipping(self, steps: int) -> LocalSource:
        raise NotImplementedError

    def sample_ids(self) -> Iterable[Any] | None:
        """Ids of all samples, as in `with_sample_ids`; None when they are unknown before the epoch is read."""
        return None

    def with_sample_ids(self, own: bool = False) -> LocalSource:
        """A source that yields sample ids in place of samples, and lists in place of batches.

        Args:
            own: whether this process reads different data, so that its positions are not valid on other processes.
        """
        raise NotImplementedError

    def base_state(self) -> dict[str, Any] | None:
        return None

    def obstacle_to_counting(self) -> str | None:
        return None

    def identity(self) -> str:
        """Description of the samplers or the stream that determine the order, for messages."""
        raise NotImplementedError

    def obstacle(self) -> str | None:
        """Why an epoch cannot be continued in its middle, or None."""
        return None


class MapSource(LocalSource):
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
        self.processes, self.index = shard.num_processes, shard.process_index
        self.counts_steps = shard.has_custom_batches
        self.step_size = None if shard.has_custom_batches else shard.step_size
        self.sample_seed = sample_seed
        self.shard.yields_single_samples = batching_of(base) is None
        self.continues_from_base = has_state(base)
        self._is_stateful = is_stateful(base)
        self._keeps_iterator = keeps_iterator(base)
        self._epoch = 0
        # The loader and shard of the epoch that was opened last.
        self._reading: tuple[DataLoader[Any], BatchSamplerShard] = base, shard

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
    def pads(self) -> bool:
        return self.shard.pads and not self.shard.has_custom_batches

    @property
    def drops_last(self) -> bool:
        return self.shard.drop_last

    @property
    def may_be_empty(self) -> bool:
        """True: `shortage` was checked before."""
        return True

    @property
    def has_exact_length(self) -> bool:
        return not self.shard.has_custom_batches and is_stock(self.shard.sampler)

    def length(self) -> int | None:
        if not self.shard.has_custom_batches:
            return length_of(self.shard.sampler)
        return length_of(self.base.dataset)

    def steps(self) -> int:
        # The length of the shard is without the skipped steps.
        return len(self.base)

    def uneven_steps(self) -> tuple[int, int] | None:
        steps = self.shard.steps_of(0), self.shard.steps_of(self.processes - 1)
        return None if None in steps or steps[0] == steps[1] else cast("tuple[int, int]", steps)

    def shortage(self) -> str | None:
        shard = self.shard
        length = self.length() if self.has_exact_length else None
        return shortage(length, shard.num_processes, shard.gives_all_a_batch)

    def open(self, at: Position | None = None, replay: RNGState | None = None) -> Iterator[Any]:
        self._reading = self.base, self.shard
        if at is None and replay is None:
            return self._opened(self.base)
        shard, base_state, unseen = self.shard, None if at is None else at.base, 0
        position = None if at is None else at.steps if shard.has_custom_batches else at.samples
        if at is not None and base_state is not None:
            # torchdata restores the data set's state and skips the indices of these batches.
            unseen = steps_in(base_state) or 0
            before = at.steps - unseen
            position = before if shard.has_custom_batches else before * (shard.step_size or 1)
        shard = shard.starting(position, replay, unseen)
        base = MapSource.reading(self.base, shard, self.sample_seed).base
        if base_state is not None:
            base.load_state_dict(base_state)  # type: ignore[attr-defined]
        self._reading = base, shard
        return self._opened(base)

    def _opened(self, base: DataLoader[Any]) -> Iterator[Any]:
        if self._keeps_iterator:
            restart_kept_iterators(base, lambda plain: opened(plain, self._epoch))
            return iter(base)
        batches = opened(base, self._epoch)
        return with_states(batches, self) if self._is_stateful else batches

    @property
    def padded(self) -> MutableMapping[int, Padding]:
        return self._reading[1].padded

    def check_draws(self) -> None:
        shard = self._reading[1]
        if not self.shard.compared:
            return
        self.shard.compared = False
        digests = gather_object([hashlib.blake2b(repr(shard.first_drawn).encode()).hexdigest()])
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise DataError(
                "cannot begin an epoch.",
                f"The sampler {self.identity()} yields other indices on process {other} than on process 0, so samples "
                "would be lost.",
                "Let it yield the indices of all processes, in the same order on each: call set_seed, or give it a "
                "torch.Generator as attribute `generator`. If it yields those of one process, as torch's "
                "DistributedSampler does, use sharding='already'.",
            )

    def upcoming_rng(self, restored: RNGState | None = None) -> RNGState | None:
        custom = self.shard.batch_sampler if self.shard.has_custom_batches else None
        return upcoming_rng(custom, self.shard.sampler, restored)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if self.sample_seed is not None:
            self.sample_seed.epoch = epoch
        for holder in (self.base.dataset, self.shard.batch_sampler, self.shard.sampler):
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)

    def redivided(self, rng_state: RNGState | None, steps: int, processes: int) -> RNGState | None:
        if rng_state is None or not isinstance(self.shard.batch_sampler, TokenBatchSampler):
            return None
        done = rng_state.value["done"]
        part = [processes, steps - sum(earlier for _, earlier in done)]
        return RNGState(rng_state.kind, {**rng_state.value, "done": [*done, part]})

    def skipping(self, steps: int) -> MapSource:
        return self.reading(self.base, self.shard.skipping(steps), self.sample_seed)

    def skipped(self) -> tuple[int, int | None]:
        steps, size = self.shard.skipped_steps, self.step_size
        return steps, None if size is None else steps * size

    def sample_ids(self) -> Iterable[Any] | None:
        length = length_of(self.base.dataset)
        return None if length is None else range(length)

    def with_sample_ids(self, own: bool = False) -> MapSource:
        shard = self.shard.skipping(0)
        return MapSource.reading(self.base, shard, dataset=IndexIds(self.base.dataset), **READS_SAMPLE_IDS)

    def base_state(self) -> dict[str, Any] | None:
        base: Any = self._reading[0]
        return base.state_dict() if self._is_stateful else None

    def identity(self) -> str:
        classes = (type(part) for part in (self.shard.batch_sampler, self.shard.sampler) if part is not None)
        return " over ".join(f"{each.__module__}.{each.__qualname__}" for each in classes)

    def obstacle(self) -> str | None:
        if can_replay(self.shard.batch_sampler if self.shard.has_custom_batches else None, self.shard.sampler):
            return None
        return f"The order of {self.identity()} cannot be replayed: it has neither a generator nor a state_dict()."

    def obstacle_to_counting(self) -> str | None:
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
        # torchdata counts batches.
        self.counts_steps = self.continues_from_base = self.self_contained = True

    def open(self, at: Position | None = None, replay: RNGState | None = None) -> Iterator[Any]:
        if at is not None and at.base is not None:
            self.base.load_state_dict(at.base)  # type: ignore[attr-defined]
            return self._opened(self.base)
        # Skipped batches are read too, because torchdata counts what it reads.
        skipped = self.shard.skipped_steps if at is None else at.steps
        batches = self._opened(self.base)
        return islice(batches, skipped, None) if skipped else batches

    def skipping(self, steps: int) -> SelfContainedSource:
        other = copy.copy(self)
        other.shard = self.shard.skipping(steps)
        return other

    def steps(self) -> int:
        return max(len(self.base) - self.shard.skipped_steps, 0)

    def obstacle_to_counting(self) -> str | None:
        """None: torchdata's state contains that of the samplers."""
        return None


def first_batches(source: LocalSource, count: int, replay: RNGState | None) -> tuple[list[Any], RNGState | None]:
    """The first batches of an epoch that will be opened at a later position.

    Args:
        source: the epoch's source.
        count: number of batches; fewer are returned if the epoch is shorter.
        replay: the random state from which the epoch begins, or None.

    Returns:
        The batches, and the random state with which to open the epoch, so that it has the order of these batches.
    """
    generators = snapshot()
    batches = source.apart().open(Position(epoch=0, steps=0, samples=0), replay)
    first = [item.batch if type(item) is PaddedBatch else item for item in islice(batches, count)]
    restore(generators)
    drawn = source.last_rng.state
    # A seed drawn from the process's generator is drawn again when the epoch is opened.
    return first, replay or (None if drawn is None or drawn.kind == "seed" else drawn)


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
    indices = indices if sample_seed is None else MappedBatches(indices, sample_seed.with_keys)
    name = "sampler" if base.batch_sampler is None else "batch_sampler"
    changes[name] = UnbatchedSampler(indices) if batching_of(base) is None else indices
    if sample_seed is not None and not isinstance(base.dataset, SeededSamples):
        changes["dataset"] = SeededSamples.of(base.dataset)
    return rebuilt(base, **changes)


def rebuilt(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """A loader of the same class and with the same attributes, except for the changes.

    Torch does not allow the sampler of an existing loader to change, so this creates a new loader without workers yet.
    """
    if keeps_iterator(loader):
        changes = reading_epochs(loader, changes)
    other = copy.copy(loader)
    vars(other).update(changes, _iterator=None)
    return other


def opened(loader: DataLoader[Any], epoch: int) -> Iterator[Any]:
    """Begin to read epoch number `epoch` through a loader."""
    return opened_with_workers(loader, epoch) if loader.num_workers else iter(loader)


def with_states(batches: Iterator[Any], source: LocalSource) -> Iterator[PaddedBatch]:
    """The batches of torchdata's loader, each with the loader's state after it, since the next batch changes it."""
    for batch in batches:
        item = batch if type(batch) is PaddedBatch else PaddedBatch(batch, None)
        # A local variable would keep the batch in memory while the loop's body runs.
        del batch
        item.base = source.base_state()
        yield item
        del item
