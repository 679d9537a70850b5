"""Samplers: shuffling by seed and epoch, and the batches of one process out of those of all."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from accel_data.order import (
    Draw,
    Draws,
    Order,
    Permuted,
    begin,
    begin_walk,
    is_stock_batching,
    permutation,
    register,
)
from accel_data.padding import Padding
from accel_data.plan import ShardPlan
from accel_data.walk import Step, walk_batches, walk_samples, walk_split_batches
from accel_state.errors import SettingError

__all__ = ("BatchSamplerShard", "SeedableRandomSampler", "SkipBatchSampler", "batching_of", "innermost_sampler")


class SeedableRandomSampler(RandomSampler):
    """Shuffles by `initial_seed + epoch` alone, so the order of an epoch is the same in every run and on every process.

    Args:
        args: of `torch.utils.data.RandomSampler`.
        data_seed: the seed of epoch 0; torch's initial seed when None.
        kwargs: of `torch.utils.data.RandomSampler`.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch = 0
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed

    def __iter__(self) -> Iterator[int]:
        self.seeded_generator()
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def seeded_generator(self) -> torch.Generator:
        """The sampler's generator as it stands before the epoch."""
        if self.generator is None:
            self.generator = torch.Generator()
        generator: torch.Generator = self.generator
        return generator.manual_seed(self.initial_seed + self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the next iteration as epoch number `epoch`."""
        self.epoch = epoch


def _begin_seeded(sampler: SeedableRandomSampler, again: Draw | None) -> tuple[Order | Iterator[int], Draw]:
    draw = _note_seeded(sampler, again)
    size = len(sampler.data_source)
    if sampler.replacement or sampler.num_samples != size:
        return iter(sampler), draw
    following = sampler.epoch + 1
    indices = permutation(size, sampler.seeded_generator())
    return Permuted(indices, lambda: sampler.set_epoch(following)), draw


def _note_seeded(sampler: SeedableRandomSampler, again: Draw | None) -> Draw:
    if again is not None and again.kind == "seeded":
        sampler.initial_seed, sampler.epoch = again.value["seed"], again.value["epoch"]
    return Draw("seeded", {"seed": sampler.initial_seed, "epoch": sampler.epoch})


register(SeedableRandomSampler, _begin_seeded, _note_seeded)


class BatchSamplerShard(BatchSampler):
    """The batches of one process out of those of a batch sampler.

    Over torch's own samplers a process computes its own indices; a custom sampler or batch sampler is walked.

    Args:
        batch_sampler: gives the batches of all processes.
        num_processes: number of processes.
        process_index: which of them.
        split_batches: cut each batch into one part per process; otherwise hand whole batches round.
        even_batches: fill up the last step with samples from the beginning, so that all processes have equal batches;
            a single process never fills up.

    Raises:
        SettingError: a number is out of range, or a batch cannot be cut into equal parts.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.draws = Draws()
        self.padded: dict[int, Padding] = {}
        self.skipped_steps = 0
        self._start_once: int | None = None
        check_process(num_processes, process_index)
        if split_batches:
            check_split(self.batch_size, num_processes)

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler below, or None when a custom batch sampler has none."""
        return innermost_sampler(self.batch_sampler)

    @property
    def total_length(self) -> int:
        """Batches of all processes."""
        return len(self.batch_sampler)

    @property
    def walked(self) -> bool:
        """Whether a custom batch sampler gives whole batches, whose samples have no position of their own."""
        return not is_stock_batching(self.batch_sampler)

    @property
    def pads(self) -> bool:
        """Whether a short last step is filled up: a single process has nobody to be even with."""
        return self.even_batches and self.num_processes > 1

    @property
    def per_process(self) -> int | None:
        """Samples of one process in one step; None when the batch sampler has no batch size."""
        if self.batch_size is None:
            return None
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    @property
    def step_size(self) -> int | None:
        """Samples of all processes in one step; None when the batch sampler has no batch size."""
        return None if self.per_process is None else self.per_process * self.num_processes

    def skipping(self, steps: int) -> BatchSamplerShard:
        """One that begins every epoch `steps` steps later and shares everything else."""
        other = copy.copy(self)
        other.skipped_steps = self.skipped_steps + steps
        other.start_once_at(None)
        return other

    def start_once_at(self, position: int | None) -> None:
        """Let the next epoch alone begin at a position: in samples, or in steps when `walked`."""
        self._start_once = position

    def plan(self, length: int, position: int | None = None) -> ShardPlan:
        """This process's part of an order of `length` samples from a position on."""
        width = self.per_process or 1
        start = self.skipped_steps * width * self.num_processes if position is None else position
        even, drop_last = self.pads, self.drop_last
        return ShardPlan(length, width, self.num_processes, self.process_index, even, drop_last, start)

    def __iter__(self) -> Iterator[list[int]]:
        # Runs when the first batch is asked for, which is when torch's own samplers draw: torch's loader makes a second
        # iterator and throws the first one away when it has workers.
        position, self._start_once = self._start_once, None
        padded: dict[int, Padding] = {}
        self.padded = padded
        if self.walked:
            yield from _mark(self._walk(self.skipped_steps if position is None else position), padded)
        else:
            yield from self._sampled(position, padded)

    def _sampled(self, position: int | None, padded: dict[int, Padding]) -> Iterator[list[int]]:
        order = begin(self.batch_sampler.sampler, self.draws)
        if isinstance(order, Iterator):
            yield from _mark(walk_samples(order, self.plan(0, position)), padded)
            return
        plan = self.plan(len(order), position)
        yield from order.rows(plan.first, plan.batch_size, plan.step_size, plan.full_steps)
        if plan.has_tail:
            added = plan.padding()
            if added:
                padded[plan.full_steps] = added
            yield order.at(plan.tail_positions())
        order.exhausted()

    def _walk(self, skip: int) -> Iterator[Step[int]]:
        with begin_walk(self.batch_sampler, self.sampler, self.draws):
            if self.split_batches:
                yield from walk_split_batches(self.batch_sampler, self.plan(0), skip)
            else:
                processes, index = self.num_processes, self.process_index
                even, drop_last, size = self.pads, self.drop_last, self.batch_size
                yield from walk_batches(self.batch_sampler, processes, index, even, drop_last, size, skip)

    def __len__(self) -> int:
        if not self.walked:
            return len(self.plan(len(self.batch_sampler.sampler)))  # type: ignore[arg-type]
        return max(self.rounds() - self.skipped_steps, 0)

    def rounds(self) -> int:
        """Batches of this process by the length of a custom batch sampler, with those that are skipped."""
        whole = len(self.batch_sampler)
        if self.split_batches:
            return whole
        rounds, rest = divmod(whole, self.num_processes)
        return rounds + bool(rest and not self.drop_last and (self.pads or self.process_index < rest))


def _mark(steps: Iterable[Step[int]], padded: dict[int, Padding]) -> Iterator[list[int]]:
    for number, (batch, padding) in enumerate(steps):
        if padding:
            padded[number] = padding
        yield batch


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches.

    Args:
        batch_sampler: gives the batches.
        skip_batches: how many to leave out at the beginning of every epoch.
    """

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self._jumping: BatchSamplerShard | None = None
        if isinstance(batch_sampler, BatchSamplerShard):
            self._jumping = batch_sampler.skipping(skip_batches)
        elif is_stock_batching(batch_sampler):
            self._jumping = BatchSamplerShard(batch_sampler).skipping(skip_batches)

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler below, or None when a custom batch sampler has none."""
        return innermost_sampler(self.batch_sampler)

    @property
    def total_length(self) -> int:
        """Batches with those that are left out."""
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[list[int]]:
        if self._jumping is not None:
            return iter(self._jumping)
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)


def batching_of(loader: DataLoader[Any]) -> Any:
    """What gives a loader whole batches of indices, which may be its sampler; None where it gives single samples."""
    return (
        loader.sampler
        if loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler)
        else loader.batch_sampler
    )


def innermost_sampler(batch_sampler: Any) -> Any:
    """The sampler that gives single indices below any number of batch samplers; None when there is none."""
    while hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    return getattr(batch_sampler, "sampler", None)


def check_process(num_processes: int, process_index: int) -> None:
    """Refuse an index that is not one of the processes.

    Raises:
        SettingError: it is not.
    """
    if num_processes < 1 or not 0 <= process_index < num_processes:
        raise SettingError(
            f"The part of process {process_index} of {num_processes} was asked for.",
            "There is no such process.",
            "Give num_processes of at least 1 and a process_index from 0 to num_processes - 1.",
        )


def check_split(batch_size: int | None, num_processes: int) -> None:
    """Refuse a batch that cannot be cut into one equal part per process.

    Raises:
        SettingError: it cannot.
    """
    if batch_size is None or batch_size % num_processes:
        raise SettingError(
            f"split_batches=True with batches of {batch_size} samples and {num_processes} processes was asked for.",
            "A batch has to be cut into one equal part for each process.",
            f"Give a batch size that is a multiple of {num_processes}, or leave split_batches off.",
        )
