"""Epochs in which every sample counts once: the batches of each process, and how many samples they have.

A process's batch may be shorter than those of others. A process without a batch repeats its last one as a stand-in, so
that it takes part in the collectives of the step; the loader then reports that the batch counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from accel_data.order import begin_epoch, replaying
from accel_data.sharding import (
    BatchSamplerShard,
    Padding,
    Step,
    StepCounts,
    divided_batches,
    grouped_batches,
)
from accel_data.token_batches import TokenBatchSampler
from accel_state.errors import DataError

__all__ = ("ExactShard",)


class ExactShard(BatchSamplerShard):
    """One process's batches, without padding.

    Args:
        batch_sampler: yields the batches of all processes.
        num_processes: number of processes.
        process_index: index of this process.
        split_batches: see `BatchSamplerShard`.
        dataset: the data set; if it has `sample_counts`, the number of samples in each of its items, they are weights.
        stand_ins: whether a process without a batch gets a stand-in. Without it, too few samples are an error.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        *,
        dataset: Any = None,
        stand_ins: bool = True,
    ) -> None:
        super().__init__(batch_sampler, num_processes, process_index, split_batches, even_batches=False)
        self._dataset, self._stand_ins = dataset, stand_ins

    @property
    def pads(self) -> bool:
        """False: an exact epoch repeats no sample."""
        return False

    @property
    def gives_all_a_batch(self) -> bool:
        """Always: a process without samples has a stand-in."""
        return True

    def steps_of_custom_batches(self, index: int | None = None) -> int:
        """Number of steps, skipped ones included, by the length of a custom batch sampler; all processes have as many.

        Args:
            index: index of the process; all processes have as many.
        """
        if isinstance(self.batch_sampler, TokenBatchSampler):
            return self.batch_sampler.steps_on(self.num_processes)
        batches = len(self.batch_sampler)
        return batches if self.split_batches else self._rounded(batches, self.num_processes)

    def _rounded(self, count: int, width: int) -> int:
        return count // width if self.drop_last else -(-count // width)

    def __len__(self) -> int:
        if self.has_custom_batches:
            return super().__len__()
        plan = self.plan(len(self.batch_sampler.sampler), self._start)  # type: ignore[arg-type]
        return self._rounded(max(plan.length - plan.start, 0), plan.step_size)

    def steps_of(self, index: int) -> int | None:
        """None: all processes have equally many."""
        return None

    def _runs(self) -> Iterator[Iterable[list[int]]]:
        padded: dict[int, Padding] = {}
        self.padded = padded
        yield self._recorded(self._counted(self._steps()), padded)

    def _steps(self) -> Iterator[list[list[int]]]:
        """The steps of the epoch, with the batch of each process; there may be fewer batches than processes."""
        if self.has_custom_batches:
            skip = self.skipped_steps if self._start is None else self._start
            with replaying(self.batch_sampler, self.sampler, self.last_rng, self._replay):
                yield from self._custom_steps(skip)
            return
        order = begin_epoch(self.batch_sampler.sampler, self.last_rng, self._replay)
        if isinstance(order, Iterator):
            plan = self.plan(0, self._start)
            indices = islice(self._first_kept(order, plan.step_size), plan.start, None)
            while step := list(islice(indices, plan.step_size)):
                if len(step) == plan.step_size or not self.drop_last:
                    yield self._divided(step)
            return
        plan = self.plan(len(order), self._start)
        for row in order.rows(plan.start, plan.step_size, plan.step_size, plan.full_steps):
            yield self._divided(row)
        if plan.tail and not self.drop_last:
            yield self._divided(order.at(range(plan.length - plan.tail, plan.length)))
        order.exhausted()

    def _custom_steps(self, skip: int) -> Iterator[list[list[int]]]:
        if isinstance(self.batch_sampler, TokenBatchSampler):
            yield from self._first_kept(self.batch_sampler.steps(self.num_processes, skip), 1)
            return
        batches = self._first_kept(iter(self.batch_sampler), self.num_processes)
        if self.split_batches:
            yield from islice(divided_batches(batches, self.plan(0)), skip, None)
            return
        for step in islice(grouped_batches(batches, self.num_processes), skip, None):
            if len(step) == self.num_processes or not self.drop_last:
                yield step

    def _divided(self, step: list[int]) -> list[list[int]]:
        """The batches of a step of single indices."""
        width = self.per_process or 1
        return [step[first : first + width] for first in range(0, self.num_processes * width, width)]

    def _counted(self, steps: Iterable[list[list[int]]]) -> Iterator[Step[int]]:
        """This process's batch of each step, with the samples of all processes."""
        weights: Sequence[int] | None = getattr(self._dataset, "sample_counts", None)
        last: list[int] = []
        full = None if self.has_custom_batches or weights is not None else self.per_process
        for step in steps:
            counts = [len(batch) for batch in step] + [0] * (self.num_processes - len(step))
            if not all(counts) and not self._stand_ins:
                raise _too_few(self.num_processes)
            own = step[self.process_index] if counts[self.process_index] else last or step[0]
            last = own
            if all(count == full for count in counts):
                yield own, None
                continue
            weight = counts
            if weights is not None:
                weight = [sum(weights[index] for index in batch) for batch in step] + [0] * (len(counts) - len(step))
            yield own, StepCounts.each(counts, weight)


def _too_few(processes: int) -> DataError:
    return DataError(
        f"Cannot divide the samples of an epoch into batches for {processes} processes.",
        "There are fewer samples than places in the last step, so some processes would have none.",
        "Use fewer processes, drop_last=True, or DataLoaderConfiguration(exact_epochs=True).",
    )
