"""The part of one process in a stream that every process reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accel_data.padding import LastOfStep
from accel_data.plan import ShardPlan
from accel_data.samplers import check_process, check_split
from accel_data.walk import walk_samples

__all__ = ("IterableDatasetShard", "ResumableShard", "seed_stream")


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process out of a stream.

    Every process reads the whole stream, so the stream has to give the same samples in the same order to all of them.

    Args:
        dataset: the stream.
        batch_size: samples of one process in a step; of all processes together with `split_batches`.
        drop_last: leave out what does not fill a step.
        num_processes: number of processes.
        process_index: which of them.
        split_batches: see `batch_size`.
        even_batches: fill up the last step with samples from the beginning; a single process never fills up.
        marking: give the last sample of a step that was filled up as `accel_data.padding.LastOfStep`, for a loader that
            collates with `MarkingCollate`; and refuse a stream that has nothing for some process.

    Raises:
        SettingError: a number is out of range, or a batch cannot be cut into equal parts.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        *,
        even_batches: bool = True,
        marking: bool = False,
    ) -> None:
        check_process(num_processes, process_index)
        if split_batches:
            check_split(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.marking = marking
        self.epoch = 0
        self.skipped_samples = 0

    @property
    def pads(self) -> bool:
        """Whether a short last step is filled up: a single process has nobody to be even with."""
        return self.even_batches and self.num_processes > 1

    def plan(self, length: int = 0) -> ShardPlan:
        """This process's part of a stream of `length` samples."""
        width = self.batch_size // self.num_processes if self.split_batches else self.batch_size
        start, even, drop_last = self.skipped_samples, self.pads, self.drop_last
        return ShardPlan(length, width, self.num_processes, self.process_index, even, drop_last, start)

    def set_epoch(self, epoch: int) -> None:
        """Make the stream begin its next iteration as epoch number `epoch`, where it knows epochs."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        seed_stream(self.dataset, self.epoch)
        return self._samples(None)

    def _samples(self, first: list[Any] | None) -> Iterator[Any]:
        # What one of several loading processes has says nothing about the stream.
        for_all = self.marking and get_worker_info() is None
        for batch, padding in walk_samples(self.dataset, self.plan(), first, for_all):
            if padding is None or not self.marking:
                yield from batch
                continue
            yield from batch[:-1]
            yield LastOfStep(batch[-1], padding)

    def __len__(self) -> int:
        plan = self.plan(len(self.dataset))  # type: ignore[arg-type]
        last = len(plan.tail_positions()) if plan.has_tail else 0
        return plan.full_steps * plan.batch_size + last


class ResumableShard(IterableDatasetShard):
    """The same of a stream that can tell its position and go back to it, as `StatefulDataLoader` asks for."""

    _position: Any = None

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream, which stands between two steps whenever a batch was given out."""
        state: dict[str, Any] = self.dataset.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration begin at a position."""
        self._position = state_dict

    def __iter__(self) -> Iterator[Any]:
        position, self._position = self._position, None
        if position is None:
            return super().__iter__()
        # What fills up the last step comes from the beginning of the epoch.
        first = list(islice(iter(self.dataset), self.plan().step_size))
        self.dataset.load_state_dict(position)  # type: ignore[attr-defined]
        return self._samples(first)


def seed_stream(dataset: Any, epoch: int) -> None:
    """Seed a stream's own `generator` with the epoch, so that every process reads it in the same order.

    A stream that has `set_epoch` looks after itself.
    """
    generator = getattr(dataset, "generator", None)
    if isinstance(generator, torch.Generator) and not hasattr(dataset, "set_epoch"):
        generator.manual_seed(epoch)
