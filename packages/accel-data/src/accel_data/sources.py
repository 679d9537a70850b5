"""Where a prepared loader gets its batches, and how it begins at any position: indexed data, or a stream."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from accel_data.adapter import rebuilt
from accel_data.iterable import IterableDatasetShard
from accel_data.order import Draw, Draws, repeatable, restore_generator, upcoming
from accel_data.padding import Padding
from accel_data.progress import Position
from accel_data.samplers import BatchSamplerShard
from accel_data.seeding import SampleSeed, SeededSamples, SeededStream, TaggedBatches
from accel_data.stateful import has_state
from accel_ops.rng import restore, snapshot

__all__ = ("MapSource", "OneByOne", "SkippedStream", "Source", "StreamSource", "first_batch")


class Source(Protocol):
    """Where a prepared loader gets its batches, and what is known of them.

    Positions are counted in samples of the global order, or in steps when `counts_steps`.
    """

    base: DataLoader[Any]

    @property
    def sample_seed(self) -> SampleSeed | None:
        """From which samples are seeded, if they are."""

    @property
    def processes(self) -> int:
        """Number of processes."""

    @property
    def step_size(self) -> int | None:
        """Samples of all processes in one step; None when it varies."""

    @property
    def draws(self) -> Draws:
        """What the order of its epochs is drawn from."""

    @property
    def counts_steps(self) -> bool:
        """Whether a position is known in steps only."""

    def missing_from_len(self) -> int:
        """Batches that the base loader counts and this source leaves out."""

    def length(self) -> int | None:
        """Samples of an epoch of all processes together; None when unknown."""

    def remainder(self, start: int | None) -> int:
        """Real samples of an incomplete last step; 0 when it is complete, -1 when unknown or dropped."""

    def open(self, at: Position | None) -> Iterator[Any]:
        """Begin an epoch, at a position if one is given."""

    def padding(self, number: int) -> Padding | None:
        """Padding of the batch that came as number `number` since the epoch was opened."""

    def upcoming(self, restored: Draw | None = None) -> Draw | None:
        """What the next epoch will be drawn from, where that is known beforehand; set to `restored` first, if given."""

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set and the samplers."""

    def skipping(self, steps: int) -> Source:
        """One whose epochs begin `steps` steps later."""

    def skipped(self) -> tuple[int, int | None]:
        """Steps and samples by which all epochs begin later."""

    def base_state(self) -> dict[str, Any] | None:
        """What torchdata needs to continue after the batch read last; None where a position is enough."""

    def identity(self) -> str:
        """Which samplers, or which stream, give the order."""

    def obstacle(self, reading: bool = False) -> str | None:
        """Why an epoch cannot be continued in its middle, or None.

        Args:
            reading: the data are read again up to there, so a state of their own does not help.
        """


class OneByOne(Sampler[int]):
    """Single indices out of batches of one, for loaders without batching.

    Args:
        shard: gives batches of one index.
    """

    def __init__(self, shard: BatchSampler) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[int]:
        return (batch[0] for batch in self.shard)

    def __len__(self) -> int:
        return len(self.shard)


class SkippedStream(IterableDataset[Any]):
    """A stream without its first samples.

    Args:
        dataset: the stream.
        samples: how many to leave out.
    """

    def __init__(self, dataset: IterableDataset[Any], samples: int) -> None:
        self.dataset = dataset
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dataset), self.samples, None)

    def __len__(self) -> int:
        return max(len(self.dataset) - self.samples, 0)  # type: ignore[arg-type]


class MapSource:
    """Batches of a data set with indices.

    Args:
        base: reads them; its (batch) sampler is, or wraps, `shard`.
        shard: this process's part.
        sample_seed: from which samples are seeded, if they are.
    """

    def __init__(self, base: DataLoader[Any], shard: BatchSamplerShard, sample_seed: SampleSeed | None = None) -> None:
        self.base = base
        self.shard = shard
        self.sample_seed = sample_seed

    @classmethod
    def over(
        cls, base: DataLoader[Any], shard: BatchSamplerShard, sample_seed: SampleSeed | None = None, **changes: Any
    ) -> MapSource:
        """One that reads through a loader like `base`, with this process's part as its (batch) sampler.

        Args:
            base: the loader.
            shard: this process's part.
            sample_seed: from which samples are seeded, if they are.
            changes: other attributes of the loader.
        """
        indices = shard if sample_seed is None else TaggedBatches(shard, sample_seed)
        if base.batch_sampler is None:
            changes["sampler"] = OneByOne(indices)
        else:
            changes["batch_sampler"] = indices
        if sample_seed is not None and not isinstance(base.dataset, SeededSamples):
            changes["dataset"] = SeededSamples(base.dataset)
        return cls(rebuilt(base, **changes), shard, sample_seed)

    @property
    def single(self) -> bool:
        """Whether the loader gives samples without batching them."""
        return self.base.batch_sampler is None

    @property
    def draws(self) -> Draws:
        """See `Source`."""
        return self.shard.draws

    @property
    def step_size(self) -> int | None:
        """See `Source`."""
        return None if self.shard.walked else self.shard.step_size

    @property
    def processes(self) -> int:
        """See `Source`."""
        return self.shard.num_processes

    @property
    def counts_steps(self) -> bool:
        """See `Source`."""
        return self.shard.walked

    def missing_from_len(self) -> int:
        """See `Source`."""
        return 0

    def length(self) -> int | None:
        """See `Source`."""
        if not self.shard.walked:
            return _length(self.shard.sampler)
        return _length(self.base.dataset)

    def remainder(self, start: int | None) -> int:
        """See `Source`."""
        length, size = self.length(), self.shard.step_size
        if length is None or not size or self.shard.drop_last:
            return -1
        return max(length - (start or 0), 0) % size

    def open(self, at: Position | None) -> Iterator[Any]:
        """See `Source`."""
        position = None if at is None else at.steps if self.shard.walked else at.samples
        self.shard.start_once_at(position)
        return iter(self.base)

    def padding(self, number: int) -> Padding | None:
        """See `Source`."""
        padding = self.shard.padded.get(number)
        if padding is None or not self.single:
            return padding
        return padding.of_single()

    def upcoming(self, restored: Draw | None = None) -> Draw | None:
        """See `Source`."""
        custom = self.shard.batch_sampler if self.shard.walked else None
        return upcoming(custom, self.shard.sampler, restored)

    def set_epoch(self, epoch: int) -> None:
        """See `Source`."""
        if self.sample_seed is not None:
            self.sample_seed.epoch = epoch
        for part in (self.base.dataset, self.shard.batch_sampler, self.shard.sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def skipping(self, steps: int) -> MapSource:
        """See `Source`."""
        return self.over(self.base, self.shard.skipping(steps), self.sample_seed)

    def skipped(self) -> tuple[int, int | None]:
        """See `Source`."""
        steps, size = self.shard.skipped_steps, self.step_size
        return steps, None if size is None else steps * size

    def base_state(self) -> dict[str, Any] | None:
        """None: a position is enough."""
        return None

    def identity(self) -> str:
        """See `Source`."""
        classes = (type(part) for part in (self.shard.batch_sampler, self.shard.sampler) if part is not None)
        return " over ".join(f"{known.__module__}.{known.__qualname__}" for known in classes)

    def obstacle(self, reading: bool = False) -> str | None:
        """See `Source`."""
        if repeatable(self.shard.batch_sampler if self.shard.walked else None, self.shard.sampler):
            return None
        return (
            f"The order of {self.identity()} cannot be drawn again: it has neither a generator nor a state of its own."
        )


class StreamSource:
    """Batches of a stream.

    Args:
        base: reads them.
        processes: number of processes that share the stream.
        step_size: samples of all processes in one step; None when unknown.
    """

    def __init__(self, base: DataLoader[Any], processes: int, step_size: int | None, skipped_steps: int = 0) -> None:
        self.base = base
        self.processes = processes
        self.step_size = step_size
        self.skipped_steps = skipped_steps
        self.draws = Draws()

    @property
    def stream(self) -> Any:
        """The stream itself, below what divides it."""
        dataset: Any = self.base.dataset
        while isinstance(dataset, (IterableDatasetShard, SeededStream)):
            dataset = dataset.dataset
        return dataset

    @property
    def sample_seed(self) -> SampleSeed | None:
        """See `Source`."""
        dataset: Any = self.base.dataset
        dataset = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
        return dataset.sample_seed if isinstance(dataset, SeededStream) else None

    @property
    def counts_steps(self) -> bool:
        """See `Source`."""
        return self.base.num_workers > 0 or not self.step_size

    def missing_from_len(self) -> int:
        """See `Source`."""
        return self.skipped_steps

    def length(self) -> int | None:
        """See `Source`."""
        return _length(self.stream)

    def remainder(self, start: int | None) -> int:
        """See `Source`."""
        length = self.length()
        if length is None or not self.step_size or self.base.drop_last:
            return -1
        return max(length - (start or 0), 0) % self.step_size

    def open(self, at: Position | None) -> Iterator[Any]:
        """See `Source`."""
        self._note_draw()
        if at is not None and at.base is not None:
            self.base.load_state_dict(at.base)  # type: ignore[attr-defined]
            return iter(self.base)
        steps = self.skipped_steps if at is None else at.steps
        samples = steps * (self.step_size or 0) if at is None else at.samples
        if not steps:
            return iter(self.base)
        if self.counts_steps or samples is None:
            return islice(iter(self.base), steps, None)
        return iter(self._without(samples))

    def _without(self, samples: int) -> DataLoader[Any]:
        dataset = self.base.dataset
        if isinstance(dataset, IterableDatasetShard):
            rest = copy.copy(dataset)
            rest.skipped_samples = samples
            return rebuilt(self.base, dataset=rest)
        return rebuilt(self.base, dataset=SkippedStream(dataset, samples))  # type: ignore[arg-type]

    def _note_draw(self) -> None:
        again, self.draws.again = self.draws.again, None
        generator = getattr(self.stream, "generator", None)
        if not isinstance(generator, torch.Generator):
            self.draws.last = Draw("fixed")
            return
        self.draws.last = restore_generator(generator, again)

    def padding(self, number: int) -> Padding | None:
        """None: the batches of a stream carry their own marks."""
        return None

    def upcoming(self, restored: Draw | None = None) -> Draw | None:
        """See `Source`."""
        generator = getattr(self.stream, "generator", None)
        return restore_generator(generator, restored) if isinstance(generator, torch.Generator) else None

    def set_epoch(self, epoch: int) -> None:
        """See `Source`."""
        if hasattr(self.base.dataset, "set_epoch"):
            self.base.dataset.set_epoch(epoch)

    def skipping(self, steps: int) -> StreamSource:
        """See `Source`."""
        other = copy.copy(self)
        other.skipped_steps += steps
        return other

    def skipped(self) -> tuple[int, int | None]:
        """See `Source`."""
        return self.skipped_steps, None if self.step_size is None else self.skipped_steps * self.step_size

    def base_state(self) -> dict[str, Any] | None:
        """See `Source`."""
        if not has_state(self.base):
            return None
        state: dict[str, Any] = self.base.state_dict()  # type: ignore[attr-defined]
        return state

    def identity(self) -> str:
        """See `Source`."""
        return f"{type(self.stream).__module__}.{type(self.stream).__qualname__}"

    def obstacle(self, reading: bool = False) -> str | None:
        """See `Source`."""
        stream = self.stream
        if hasattr(stream, "set_epoch") or (has_state(self.base) and not reading):
            return None
        if isinstance(getattr(stream, "generator", None), torch.Generator):
            return None
        hint = " Its own state is used with use_stateful_dataloader=True." if hasattr(stream, "state_dict") else ""
        return (
            f"The stream {self.identity()} has no position: neither set_epoch nor a generator says that it gives the "
            f"same samples again.{hint}"
        )


def first_batch(source: Source) -> Any:
    """The first batch of the epoch that a source is about to give from a later position; None when there is none.

    What the epoch draws is drawn again afterwards.
    """
    pending, generators = source.draws.again, snapshot()
    first = next(source.open(Position(epoch=0, steps=0, samples=0)), None)
    restore(generators)
    drawn = source.draws.last
    # A seed that comes from the process's generator is drawn again from there.
    source.draws.again = pending or (None if drawn is None or drawn.kind == "seed" else drawn)
    return first


def _length(source: Any) -> int | None:
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None
