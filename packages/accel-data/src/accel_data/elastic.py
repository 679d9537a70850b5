"""Loaders for runs whose world size changes between optimizer steps; every sample is still read once an epoch.

The position in the data depends only on the number of optimizer steps: step s has the samples sG up to (s + 1)G of the
global order, counted over all epochs, with the same G for any number of processes. So a repeated step reads the
same samples again, and a process that joins or restarts continues at the position of the others. The samples of a
step are split into batches, which are distributed over the processes: fewer processes accumulate more batches.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_data.global_order import check_global_order
from accel_data.hooks import accompanied
from accel_data.loader import DataLoaderShard
from accel_data.order import LastRNG, Order, begin_epoch
from accel_data.source import MapSource, loader_over, opened
from accel_ops.conversion import send_to_device
from accel_state.errors import Conflict

__all__ = ("ElasticLoader", "MicroBatchShare", "StepMembers", "StepPlan")

_Order = Order | list[int]
_OF_THE_RUN: Final = ("begin_step", "trains", "share")
"""Attributes that are not pickled."""


class StepMembers(Protocol):
    """The processes of the next optimizer step, as a backend returns them."""

    @property
    def number(self) -> int:
        """The number of optimizer steps before this one."""

    @property
    def count(self) -> int:
        """The number of processes that share the samples of the step."""

    @property
    def index(self) -> int:
        """The index of this process among them."""

    @property
    def batches(self) -> int:
        """The number of batches in every step of the run, for any `count`."""


@dataclass
class MicroBatchShare:
    """The share of the last yielded batch in an optimizer step.

    Args:
        step: number of the optimizer step.
        samples: samples of this batch that count; 0 if the process has none and only joins the collectives.
        total: samples of the step on all processes.
        members: the number of processes that share the step.
        last: whether this is the process's last batch of the step.

    Attributes:
        accumulated: whether the loop entered `accumulate` for it.
        stepped: whether the loop called an optimizer's `step` for it.
    """

    step: int
    samples: int
    total: int
    members: int
    last: bool
    accumulated: bool = False
    stepped: bool = False

    @property
    def factor(self) -> float:
        """Factor for the mean loss of the batch, so that the mean over processes is the mean loss of the step."""
        return self.members * self.samples / self.total


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
        cut = [range(begin, min(begin + size, end)) for begin in range(first, end, size)]
        own = [(positions, len(positions)) for positions in cut[index::count]]
        return own or [(cut[index % len(cut)], 0)]


class ElasticLoader(DataLoaderShard):
    """A loader that agrees on the processes of each optimizer step before it draws the indices of the step's batches.

    This applies to epochs of training. In epochs of evaluation it behaves like the original loader.

    Attributes:
        begin_step: agrees on the processes of the next optimizer step.
        trains: returns whether the beginning epoch is one of training.
        share: the share of the last yielded batch in a step; None in evaluation.
    """

    source: MapSource
    begin_step: Callable[[], StepMembers] | None = None
    trains: Callable[[], bool] | None = None
    share: MicroBatchShare | None = None

    @staticmethod
    def check(loader: Any) -> None:
        """Check before preparation that a loader can follow optimizer steps.

        Args:
            loader: the script's loader.

        Raises:
            Conflict: it reads a stream.
        """
        if isinstance(getattr(loader, "dataset", None), IterableDataset):
            raise _cannot_follow()

    @classmethod
    def following(
        cls, loader: DataLoader[Any], begin_step: Callable[[], StepMembers], trains: Callable[[], bool]
    ) -> ElasticLoader:
        """A prepared loader that follows optimizer steps.

        Args:
            loader: what `prepare_data_loader` returned.
            begin_step: agrees on the processes of the next optimizer step.
            trains: returns whether the beginning epoch is one of training.

        Raises:
            Conflict: the order of its samples depends on more than the seed and the epoch.
        """
        if isinstance(loader, cls):
            return loader
        if not isinstance(loader, DataLoaderShard) or not isinstance(loader.source, MapSource):
            raise _cannot_follow()
        check_global_order(loader.base_dataloader, loader.source, own_shard=False, dispatched=False, compared=False)
        options = loader._options()
        elastic = cls.around(
            loader.source, options, loader.use_stateful_dataloader, loader.gradient_state, loader.progress
        )
        elastic.begin_step, elastic.trains = begin_step, trains
        return elastic

    def skipping(self, steps: int) -> ElasticLoader:
        """See `PreparedLoader`; in training, the position depends only on the number of the step."""
        other = super().skipping(steps)
        other.begin_step, other.trains = self.begin_step, self.trains
        return other

    def _kept(self) -> dict[str, Any]:
        return {name: value for name, value in super()._kept().items() if name not in _OF_THE_RUN}

    def _batches(self) -> Generator[Any, None, None]:
        self.share = None
        if self.begin_step is None or self.trains is None or not self.trains():
            yield from super()._batches()
            return
        self.progress.take_start()
        self.begin()
        try:
            steps, between = self._steps(self.begin_step), self.between_batches
            yield from (steps if between is None else accompanied(steps, between, self.pauses))
            self.progress.finish()
        finally:
            self.share = None
            self.end()

    def _steps(self, begin_step: Callable[[], StepMembers]) -> Generator[Any, None, int]:
        """Yield the batches of the epoch's steps, and return their number."""
        members = begin_step()
        plan = self._plan(members)
        epoch = drawn = members.number // len(plan)
        # The other processes finished the epoch before this process joined.
        if epoch > self.progress.epoch:
            return 0
        order, batches, planned, given = self._order(epoch), iter(()), None, 0
        while (now := members.number // len(plan)) <= epoch:
            at, who = members.number % len(plan), (members.count, members.index)
            if now != drawn:
                order, drawn = self._order(now), now
            if planned != (now, members.number, who):
                batches = self._read(_StepIndices(order, plan, at, who))
            share, total = plan.share(at, *who), plan.samples(at)
            self.progress.begin(at, at * plan.step_size, None, plan.length, -1)
            latest: MicroBatchShare | None = None
            for number, (_, samples) in enumerate(share, start=1):
                batch = self._next(batches)
                if self.device is not None:
                    batch = send_to_device(batch, self.device, self._non_blocking)
                last = number == len(share)
                self.share = latest = MicroBatchShare(members.number, samples, total, members.count, last)
                if last:
                    self.progress.begin(at + 1, at * plan.step_size + total, None, plan.length, -1)
                    self.progress.end_of_dataloader = at + 1 == len(plan)
                given += 1
                yield batch
            planned, before, members = (now, members.number + 1, who), members.number, begin_step()
            if members.number == before and latest is not None and not latest.stepped:
                raise self._error(
                    f"cannot continue after optimizer step {before}.",
                    "The loop read all batches of the step, but did not step a prepared optimizer.",
                    "Call optimizer.step() for each batch, or model.eval() before a loop without training.",
                )
        return given

    def _plan(self, members: StepMembers) -> StepPlan:
        """The steps of an epoch, all of the same size."""
        shard = self.source.shard
        batches = members.batches * self.gradient_state.num_steps
        size = shard.batch_size or 1
        plan = StepPlan(
            self.source.length() or 0,
            max(size // members.batches, 1) if shard.split_batches else size,
            batches,
            shard.drop_last,
        )
        if not len(plan):
            raise self._error(
                "cannot begin an epoch.",
                f"It has {plan.length} samples, but a step of the run has {plan.step_size}.",
                "Use a smaller batch size, more samples, or drop_last=False.",
            )
        return plan

    def _order(self, epoch: int) -> _Order:
        self.source.set_epoch(epoch)
        order = begin_epoch(self.source.shard.sampler, LastRNG())
        return list(order) if isinstance(order, Iterator) else order

    def _read(self, indices: _StepIndices) -> Iterator[Any]:
        """Batches from a step on, prefetched by DataLoader workers while the processes do not change."""
        source = self.source
        reading = loader_over(source.base, indices, source.sample_seed)
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

    def __init__(self, order: _Order, plan: StepPlan, step: int, who: tuple[int, int]) -> None:
        self._order, self._plan, self._step, self._who = order, plan, step, who
        self.batch_size, self.drop_last = plan.batch_size, False

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order
        for step in range(self._step, len(self._plan)):
            for positions, _ in self._plan.share(step, *self._who):
                yield [order[i] for i in positions] if isinstance(order, list) else order.at(positions)

    def __len__(self) -> int:
        return sum(len(self._plan.share(step, *self._who)) for step in range(self._step, len(self._plan)))
