"""Epochs of loaders in runs whose world size changes between optimizer steps; every sample is still read once an epoch.

The position in the data depends only on the number of optimizer steps: step s has the samples sG up to (s + 1)G of the
global order, counted over all epochs, with the same G for any number of processes. So a repeated step reads the
same samples again, and a process that joins or restarts continues at the position of the others. The samples of a
step are split into batches, which are distributed over the processes: fewer processes accumulate more batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_data import DataLoaderShard, PreparedLoader
from accel_data.global_order import check_global_order
from accel_data.order import LastRNG, Order, begin_epoch
from accel_data.source import MapSource, loader_over, opened
from accel_plugins import BatchShare
from accel_state.errors import Conflict

__all__ = ("ElasticEpochs", "StepMembers", "StepPlan", "check_follows_steps", "follow_steps", "share_of_batch")

_Order = Order | list[int]


@dataclass(frozen=True)
class StepMembers:
    """The processes that share the samples of an optimizer step.

    Args:
        number: optimizer steps that the run has completed. It determines the samples: a repeated step has the same
            number and the same samples.
        count: the number of processes that share the samples.
        index: the index of this process among them.
        batches: single-process batches in every step, whatever `count` is; with fewer processes, each accumulates more
            batches.
    """

    number: int
    count: int
    index: int
    batches: int


@dataclass(frozen=True)
class StepPlan:
    """The optimizer steps of an epoch.

    Args:
        length: samples of the epoch.
        batch_size: samples of one batch.
        batches: batches of a step.
        drop_last: drop an incomplete last step.

    Example:
        >>> plan = StepPlan(length=10, batch_size=2, batches=3)
        >>> len(plan), plan.share(0, count=2, index=0), plan.share(1, count=2, index=1)
        (2, [(range(0, 2), 2), (range(4, 6), 2)], [(range(8, 10), 2)])
    """

    length: int
    batch_size: int
    batches: int
    drop_last: bool = False

    @property
    def step_size(self) -> int:
        """Samples of a step on all processes."""
        return self.batch_size * self.batches

    def __len__(self) -> int:
        return self.length // self.step_size if self.drop_last else -(-self.length // self.step_size)

    def samples(self, step: int) -> int:
        """Samples of one step; the last of an epoch may have fewer than the others."""
        return min(self.step_size, self.length - step * self.step_size)

    def share(self, step: int, count: int, index: int) -> list[tuple[range, int]]:
        """The batches of one of `count` processes: positions in the order, and the number of samples that count.

        A process without a batch repeats one of another process, and its samples do not count.
        """
        first, size = step * self.step_size, self.batch_size
        end = first + self.samples(step)
        batches = [range(begin, min(begin + size, end)) for begin in range(first, end, size)]
        own = [(positions, len(positions)) for positions in batches[index::count]]
        return own or [(batches[index % len(batches)], 0)]


def check_follows_steps(loader: Any) -> None:
    """Check before preparation that a script's loader can follow optimizer steps.

    Raises:
        Conflict: it reads a stream.
    """
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        raise _cannot_follow()


def follow_steps(
    loader: DataLoader[Any], begin_step: Callable[[], StepMembers], trains: Callable[[], bool]
) -> ElasticEpochs:
    """Let a prepared loader agree on the processes of each optimizer step before it draws the indices of its batches.

    This applies to epochs of training. Epochs of evaluation do not change. A loader that follows steps already is left
    as it is.

    Args:
        loader: what `prepare_data_loader` returned.
        begin_step: agrees on the processes of the next optimizer step.
        trains: returns whether the beginning epoch is one of training.

    Returns:
        What reads the loader's epochs.

    Raises:
        Conflict: the order of its samples depends on more than the seed and the epoch.
    """
    if not isinstance(loader, DataLoaderShard) or not isinstance(loader.source, MapSource):
        raise _cannot_follow()
    if isinstance(loader.epoch_reader, ElasticEpochs):
        return loader.epoch_reader
    check_global_order(loader.base_dataloader, loader.source)
    loader.epoch_reader = epochs = ElasticEpochs(begin_step, trains)
    return epochs


def share_of_batch(loader: Any) -> BatchShare | None:
    """The share of a loader's newest batch in the optimizer step; None in evaluation, and if it follows no steps."""
    epochs = getattr(loader, "epoch_reader", None)
    return epochs.share if isinstance(epochs, ElasticEpochs) else None


class ElasticEpochs:
    """Reads the training epochs of one loader step by step; the `epoch_reader` of a `DataLoaderShard`.

    Args:
        begin_step: agrees on the processes of the next optimizer step.
        trains: returns whether the beginning epoch is one of training.

    Attributes:
        share: the share of the last yielded batch in its step; None in evaluation.
    """

    def __init__(self, begin_step: Callable[[], StepMembers], trains: Callable[[], bool]) -> None:
        self.share: BatchShare | None = None
        self._begin_step, self._trains = begin_step, trains

    def __call__(self, loader: PreparedLoader) -> Iterator[Any] | None:
        """The batches of the epoch in training; None in evaluation."""
        self.share = None
        return self._batches(loader) if self._trains() else None

    def _batches(self, loader: PreparedLoader) -> Iterator[Any]:
        try:
            yield from self._steps(loader)
        finally:
            self.share = None

    def _steps(self, loader: PreparedLoader) -> Iterator[Any]:
        members, progress = self._begin_step(), loader.progress
        plan = _plan(loader, members)
        epoch = order_epoch = members.number // len(plan)
        # The other processes finished the epoch before this process joined.
        if epoch > progress.epoch:
            return
        order, batches, expected = _order(loader, epoch), iter(()), None
        while (step_epoch := members.number // len(plan)) <= epoch:
            step, place = members.number % len(plan), (members.count, members.index)
            if step_epoch != order_epoch:
                order, order_epoch = _order(loader, step_epoch), step_epoch
            if expected != (step_epoch, members.number, place):
                batches = _read(loader, _StepIndices(order, plan, step, place))
            share, total = plan.share(step, *place), plan.samples(step)
            progress.iteration.begin(step, step * plan.step_size, None, -1)
            newest: BatchShare | None = None
            for number, (_, samples) in enumerate(share, start=1):
                batch = loader.next_batch(batches)
                last = number == len(share)
                self.share = newest = BatchShare(members.number, samples, total, members.count, last)
                if last:
                    progress.iteration.begin(step + 1, step * plan.step_size + total, None, -1)
                    progress.iteration.end_of_dataloader = step + 1 == len(plan)
                yield batch
            expected = (step_epoch, members.number + 1, place)
            before, members = members.number, self._begin_step()
            if members.number == before and newest is not None and not newest.stepped:
                raise loader.error(
                    f"cannot continue after optimizer step {before}.",
                    "The loop read all batches of the step, but did not step a prepared optimizer.",
                    "Call optimizer.step() for each batch, or model.eval() before a loop without training.",
                )


def _plan(loader: PreparedLoader, members: StepMembers) -> StepPlan:
    """The steps of an epoch, all of the same size."""
    shard = _source(loader).shard
    size = shard.batch_size or 1
    plan = StepPlan(
        loader.source.length() or 0,
        max(size // members.batches, 1) if shard.split_batches else size,
        members.batches * loader.gradient_state.num_steps,
        shard.drop_last,
    )
    if not len(plan):
        raise loader.error(
            "cannot begin an epoch.",
            f"It has {plan.length} samples, but a step of the run has {plan.step_size}.",
            "Use a smaller batch size, more samples, or drop_last=False.",
        )
    return plan


def _source(loader: PreparedLoader) -> MapSource:
    assert isinstance(loader.source, MapSource)
    return loader.source


def _order(loader: PreparedLoader, epoch: int) -> _Order:
    _source(loader).set_epoch(epoch)
    order = begin_epoch(_source(loader).shard.sampler, LastRNG())
    return list(order) if isinstance(order, Iterator) else order


def _read(loader: PreparedLoader, indices: _StepIndices) -> Iterator[Any]:
    """Batches from a step on, prefetched by DataLoader workers while the processes do not change."""
    reading = loader_over(_source(loader).base, indices, _source(loader).sample_seed)
    # Torch draws a seed for each iterator. Changes of processes must not advance the process's generator.
    reading.generator = torch.Generator().manual_seed(torch.initial_seed())
    return opened(reading, epoch=0)


def _cannot_follow() -> Conflict:
    return Conflict(
        "Cannot use this loader in a run whose world size may change.",
        "It reads a stream or receives its batches from another process, so it cannot start at an arbitrary step.",
        "Use a map-style data set, and remove dispatch_batches.",
    )


class _StepIndices(BatchSampler):
    """The indices of one process's batches from a step of the epoch on, while the processes do not change."""

    def __init__(self, order: _Order, plan: StepPlan, step: int, place: tuple[int, int]) -> None:
        self._order, self._plan, self._step, self._place = order, plan, step, place
        self.batch_size, self.drop_last = plan.batch_size, False

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order
        for step in range(self._step, len(self._plan)):
            for positions, _ in self._plan.share(step, *self._place):
                yield [order[i] for i in positions] if isinstance(order, list) else order.at(positions)

    def __len__(self) -> int:
        return sum(len(self._plan.share(step, *self._place)) for step in range(self._step, len(self._plan)))
