"""The source of a dispatching loader: steps of all processes, read in the main process out of another source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from accel_data.order import Draw, Draws
from accel_data.padding import Padding
from accel_data.plan import shortage
from accel_data.progress import Position
from accel_data.rounds import Round, rounds
from accel_data.seeding import SampleSeed
from accel_data.sources import Source, first_batches

__all__ = ("DispatchedSource",)


class DispatchedSource:
    """Steps out of a source that gives the script's own batches.

    Args:
        inner: gives the batches of the loader as the script made it.
        processes: number of parts of a step.
        split: cut each batch; otherwise a step takes one batch for each process.
        drop_last: leave out a last step that lacks batches.
        slice_fn: `f(batch, slice, process_index=, num_processes=)` that cuts a batch for one process.
    """

    def __init__(
        self,
        inner: Source,
        processes: int,
        split: bool = False,
        drop_last: bool = False,
        slice_fn: Callable[..., Any] | None = None,
    ) -> None:
        self.inner = inner
        self.base: DataLoader[Any] = inner.base
        self.processes = processes
        self.split = split
        self.drop_last = drop_last
        self.slice_fn = slice_fn

    @property
    def per_step(self) -> int:
        """Batches of the loader in one step."""
        return 1 if self.split else self.processes

    @property
    def step_size(self) -> int | None:
        """See `Source`."""
        size = self.inner.step_size
        return None if size is None else size * self.per_step

    @property
    def sample_seed(self) -> SampleSeed | None:
        """See `Source`."""
        return self.inner.sample_seed

    @property
    def draws(self) -> Draws:
        """See `Source`."""
        return self.inner.draws

    @property
    def counts_steps(self) -> bool:
        """See `Source`."""
        return self.inner.counts_steps

    @property
    def index(self) -> int:
        """0: the main process reads for all."""
        return 0

    def names(self) -> Iterable[Any] | None:
        """See `Source`."""
        return self.inner.names()

    def named(self, own: bool = False) -> DispatchedSource:
        """See `Source`."""
        return DispatchedSource(self.inner.named(own), self.processes, self.split, self.drop_last)

    def missing_from_len(self) -> int:
        """See `Source`."""
        return self.inner.missing_from_len()

    def length(self) -> int | None:
        """See `Source`."""
        return self.inner.length()

    def remainder(self, start: int | None) -> int:
        """See `Source`."""
        length, size = self.length(), self.step_size
        # What comes without being batched may hold any number of samples.
        if length is None or not size or self.drop_last or self.base.batch_sampler is None:
            return -1
        return max(length - (start or 0), 0) % size

    def shortage(self) -> str | None:
        """See `Source`."""
        return shortage(self.length(), self.processes, not self.drop_last)

    def steps(self, at: Position | None) -> int | None:
        """See `Source`."""
        batches = self.inner.steps(self._where(at))
        if batches is None:
            return None
        return batches // self.per_step if self.drop_last else -(-batches // self.per_step)

    @property
    def pads(self) -> bool:
        """False: what remains is cut into equal parts, and filled up only where it does not divide evenly."""
        return False

    @property
    def may_be_empty(self) -> bool:
        """See `Source`."""
        return self.drop_last or self.inner.may_be_empty

    def _where(self, at: Position | None) -> Position | None:
        """A position as the source below counts it."""
        return None if at is None else dataclasses.replace(at, steps=at.steps * self.per_step)

    def open(self, at: Position | None) -> Iterator[Round]:
        """Begin an epoch, at a position if one is given; for the main process only."""
        steps = self.inner.skipped()[0] if at is None else at.steps
        first = first_batches(self.inner, self.per_step) if steps and not self.drop_last else None
        inner, split, drop_last = self.inner, self.split, self.drop_last
        return rounds(
            inner.open(self._where(at)), self.processes, split, drop_last, self.slice_fn, first, inner.base_state
        )

    @property
    def padded(self) -> Collection[int]:
        """None of them: see `padding`."""
        return ()

    def padding(self, number: int) -> Padding | None:
        """None: the steps carry their own."""
        return None

    def upcoming(self, restored: Draw | None = None) -> Draw | None:
        """See `Source`."""
        return self.inner.upcoming(restored)

    def set_epoch(self, epoch: int) -> None:
        """See `Source`."""
        self.inner.set_epoch(epoch)

    def skipping(self, steps: int) -> DispatchedSource:
        """See `Source`."""
        inner = self.inner.skipping(steps * self.per_step)
        return DispatchedSource(inner, self.processes, self.split, self.drop_last, self.slice_fn)

    def skipped(self) -> tuple[int, int | None]:
        """See `Source`."""
        batches, samples = self.inner.skipped()
        return batches // self.per_step, samples

    @property
    def continues_from_base(self) -> bool:
        """See `Source`."""
        return self.inner.continues_from_base

    def base_state(self) -> dict[str, Any] | None:
        """See `Source`; the steps carry it too, since more is read ahead here."""
        return self.inner.base_state()

    @property
    def self_contained(self) -> bool:
        """See `Source`."""
        return self.inner.self_contained and self.processes == 1

    def identity(self) -> str:
        """See `Source`."""
        return self.inner.identity()

    def obstacle(self) -> str | None:
        """See `Source`."""
        return self.inner.obstacle()

    def foreign_obstacle(self) -> str | None:
        """See `Source`."""
        if self.processes > 1:
            return "It counts what the main process had read ahead for all, so the position is not known."
        return self.inner.foreign_obstacle()
