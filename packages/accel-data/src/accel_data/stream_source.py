"""Batches of a stream, and the choice of the source for any loader."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_data.order import LastRNG, RNGState, has_own_state, restore_generator
from accel_data.padding import PaddingCollate
from accel_data.progress import Position
from accel_data.seeding import SeededStream
from accel_data.sharding import BatchSamplerShard, batching_of, length_of
from accel_data.source import (
    READS_SAMPLE_IDS,
    ContentHashIds,
    LocalSource,
    MapSource,
    PositionIds,
    SelfContainedSource,
    as_list,
    opened,
    rebuilt,
    with_states,
)
from accel_data.stateful import has_state, is_finished, is_stateful, knows_its_order
from accel_data.streams import IterableDatasetShard, ResumableSkip, SkippedStream
from accel_data.token_batches import TokenBatches

__all__ = ("StreamSource", "source_of")


class StreamSource(LocalSource):
    """Batches of a stream.

    Args:
        base: the loader that reads them.
        processes: number of processes that share the stream.
        step_size: samples of all processes in one step; None when unknown.
        self_contained: whether torchdata's state describes a position completely.

    Attributes:
        rereads: whether a stream without a position yields the same samples each time it is read.
    """

    rereads = False

    def __init__(
        self, base: DataLoader[Any], processes: int, step_size: int | None, *, self_contained: bool = False
    ) -> None:
        self.base = base
        self.last_rng = LastRNG()
        self.skipped_steps = 0
        self.processes, self.step_size, self.self_contained = processes, step_size, self_contained
        self.counts_steps = base.num_workers > 0 or not step_size
        self.continues_from_base = has_state(base)
        dataset: Any = base.dataset
        if isinstance(dataset, IterableDatasetShard):
            self.index, dataset = dataset.process_index, dataset.dataset
        if isinstance(dataset, SeededStream):
            self.sample_seed = dataset.sample_seed
        self._epoch = 0
        # The loader of the epoch that was opened last.
        self._reading = base

    @property
    def stream(self) -> Any:
        """The user's stream, without the wrappers that shard and seed it."""
        dataset: Any = self.base.dataset
        while isinstance(dataset, (IterableDatasetShard, SeededStream)):
            dataset = dataset.dataset
        return dataset

    @property
    def pads(self) -> bool:
        dataset = self.base.dataset
        return isinstance(dataset, IterableDatasetShard) and dataset.pads

    @property
    def drops_last(self) -> bool:
        return self.base.drop_last

    @property
    def may_be_empty(self) -> bool:
        return self.base.drop_last or (self.processes > 1 and not self.pads)

    def length(self) -> int | None:
        return length_of(self.stream)

    def open(self, at: Position | None = None, replay: RNGState | None = None) -> Iterator[Any]:
        generator = self._generator
        self.last_rng.state = RNGState("fixed") if generator is None else restore_generator(generator, replay)
        self._reading = self.base
        if at is not None and at.base is not None:
            # With the state of a finished epoch, torchdata would begin the next epoch; this one has no batches left.
            ended = at.steps > 0 and is_finished(at.base)
            if ended and self.base.num_workers:
                # Workers copy the stream from this process in each epoch, so no state has to be loaded.
                return iter(())
            self.base.load_state_dict(at.base)  # type: ignore[attr-defined]
            # torchdata restores the stream's state when it is opened. If that happened in the next epoch, it would
            # undo `set_epoch`.
            batches = self._opened(self._epoch)
            return iter(()) if ended else batches
        steps = self.skipped_steps if at is None else at.steps
        samples = steps * (self.step_size or 0) if at is None else at.samples
        if not steps:
            return self._opened(self._epoch)
        if self.counts_steps or samples is None:
            return islice(self._opened(self._epoch), steps, None)
        self._reading = self._without(samples)
        return self._opened(0)

    def _opened(self, epoch: int) -> Iterator[Any]:
        batches = opened(self._reading, epoch)
        return with_states(batches, self) if is_stateful(self._reading) else batches

    def apart(self) -> StreamSource:
        if self.base.num_workers or not has_own_state(self.stream):
            return self
        other = copy.copy(self)
        try:
            other.base = rebuilt(self.base, dataset=copy.deepcopy(self.base.dataset))
        except (TypeError, pickle.PicklingError):
            # The data set contains an object that cannot be copied, such as an open file.
            return self
        return other

    def _without(self, samples: int) -> DataLoader[Any]:
        dataset = self.base.dataset
        if isinstance(dataset, IterableDatasetShard):
            rest = copy.copy(dataset)
            rest.skipped_samples = samples
            return rebuilt(self.base, dataset=rest)
        kind = ResumableSkip if self.continues_from_base else SkippedStream
        return rebuilt(self.base, dataset=kind(dataset, samples))  # type: ignore[arg-type]

    @property
    def _generator(self) -> torch.Generator | None:
        generator = getattr(self.stream, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def upcoming_rng(self, restored: RNGState | None = None) -> RNGState | None:
        generator = self._generator
        return None if generator is None else restore_generator(generator, restored)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if hasattr(self.base.dataset, "set_epoch"):
            self.base.dataset.set_epoch(epoch)

    def skipping(self, steps: int) -> StreamSource:
        other = copy.copy(self)
        other.skipped_steps += steps
        return other

    def skipped(self) -> tuple[int, int | None]:
        return self.skipped_steps, None if self.step_size is None else self.skipped_steps * self.step_size

    def with_sample_ids(self, own: bool = False) -> StreamSource:
        ids, dataset = (ContentHashIds if own else PositionIds), self.base.dataset
        other = copy.copy(self)
        other.continues_from_base = False
        if isinstance(dataset, IterableDatasetShard):
            shard = copy.copy(dataset)
            shard.dataset = ids(dataset.dataset)
            changes = READS_SAMPLE_IDS | {"collate_fn": PaddingCollate(as_list)}
            other.base = rebuilt(self.base, dataset=shard, **changes)
        else:
            other.base = rebuilt(self.base, dataset=ids(dataset), **READS_SAMPLE_IDS)
        return other

    def base_state(self) -> dict[str, Any] | None:
        return self._reading.state_dict() if is_stateful(self._reading) else None  # type: ignore[attr-defined]

    def identity(self) -> str:
        return f"{type(self.stream).__module__}.{type(self.stream).__qualname__}"

    def obstacle(self) -> str | None:
        if self.continues_from_base:
            return None
        obstacle = self.obstacle_to_counting()
        if self._generator is None or obstacle is None:
            return obstacle
        if self.base.num_workers and self.base.persistent_workers:
            return "Persistent DataLoader workers have copies of the stream's generator, whose states are not saved."
        return None

    def obstacle_to_counting(self) -> str | None:
        stream = self.stream
        if isinstance(stream, TokenBatches):
            # Its own order is repeatable.
            stream = stream.stream
        if hasattr(stream, "set_epoch") or (self.continues_from_base and self.processes == 1):
            return None
        # The sharding wrapper seeds the stream's generator from the epoch.
        if self._generator is not None and self.stream is not self.base.dataset:
            return None
        if self.rereads:
            return None
        hint = " Its own state is used with use_stateful_dataloader=True." if hasattr(stream, "state_dict") else ""
        return (
            f"The stream {self.identity()} has no position: it has neither set_epoch nor a generator, so its samples "
            f"may not be repeatable.{hint}"
        )


def source_of(loader: DataLoader[Any]) -> LocalSource:
    """The source of a loader whose samplers are already those of this process."""
    contained = knows_its_order(loader)
    if isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, 1, loader.batch_size, self_contained=contained)
    if contained:
        return SelfContainedSource(loader)
    batching = batching_of(loader)
    if isinstance(batching, BatchSamplerShard):
        return MapSource(loader, batching)
    return MapSource.reading(loader, BatchSamplerShard(batching or BatchSampler(loader.sampler, 1, False)))
