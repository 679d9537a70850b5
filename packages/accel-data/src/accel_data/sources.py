"""Where a prepared loader gets its batches, and how it begins at any position."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any, Final, Protocol

from torch.utils.data import DataLoader

from accel_data.names import as_list
from accel_data.order import Draw, Draws
from accel_data.padding import Padding
from accel_data.progress import Position
from accel_data.seeding import SampleSeed
from accel_ops.rng import restore, snapshot

__all__ = ("READS_NAMES", "Source", "first_batches", "length_of")

READS_NAMES: Final[dict[str, Any]] = {"collate_fn": as_list, "pin_memory": False, "worker_init_fn": None}
"""Changes to a loader that reads names in place of samples."""


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

    @property
    def index(self) -> int:
        """Which of the processes this is."""

    def missing_from_len(self) -> int:
        """Batches that the base loader counts and this source leaves out."""

    def names(self) -> Iterable[Any] | None:
        """Names of all samples, as those of `named` have them; None when they are not known beforehand."""

    def named(self, own: bool = False) -> Source:
        """The same with names in place of samples and lists in place of batches.

        Args:
            own: the data are this process's own, so a position says nothing to the others.
        """

    def length(self) -> int | None:
        """Samples of an epoch of all processes together; None when unknown."""

    def remainder(self, start: int | None) -> int:
        """Real samples of an incomplete last step; 0 when it is complete, -1 when unknown or dropped."""

    def shortage(self) -> str | None:
        """Why an epoch of this length has nothing for some process, or None."""

    def steps(self, at: Position | None) -> int | None:
        """Steps that this process takes from a position on, if the length that was reported is true.

        None where none was reported, or where the loading processes divide the data in a way of their own.
        """

    @property
    def pads(self) -> bool:
        """Whether a last step that is not full is always filled up."""

    @property
    def may_be_empty(self) -> bool:
        """Whether an epoch without a single batch is what was asked for."""

    def open(self, at: Position | None) -> Iterator[Any]:
        """Begin an epoch, at a position if one is given."""

    @property
    def padded(self) -> Collection[int]:
        """Numbers of the batches whose padding `padding` knows; grows while the epoch is read."""

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

    @property
    def continues_from_base(self) -> bool:
        """Whether torchdata continues an epoch by itself, because the data set has a state of its own."""

    def base_state(self) -> dict[str, Any] | None:
        """torchdata's state after the batch given out last; None of a loader that is not torchdata's."""

    @property
    def self_contained(self) -> bool:
        """Whether that state says all there is to say of a position."""

    def identity(self) -> str:
        """Which samplers, or which stream, give the order."""

    def obstacle(self) -> str | None:
        """Why an epoch cannot be continued in its middle, or None."""

    def foreign_obstacle(self) -> str | None:
        """Why an epoch of which nothing but a number of batches is known cannot be continued there, or None."""


def first_batches(source: Source, count: int) -> list[Any]:
    """The first batches of the epoch that a source is about to give from a later position; fewer if it has fewer.

    What the epoch draws is drawn again afterwards.
    """
    pending, generators = source.draws.again, snapshot()
    first = list(islice(source.open(Position(epoch=0, steps=0, samples=0)), count))
    restore(generators)
    drawn = source.draws.last
    # A seed that comes from the process's generator is drawn again from there.
    source.draws.again = pending or (None if drawn is None or drawn.kind == "seed" else drawn)
    return first


def length_of(source: Any) -> int | None:
    """What `len` says, or None when it cannot be asked."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None
