"""The position of a loader: the object that metrics, accumulation and checkpoints read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from accel_data.kept_batches import KeptBatches
from accel_data.order import RNGState
from accel_data.sharding import Padding

__all__ = ("Iteration", "Position", "Progress")


@dataclass(frozen=True)
class Position:
    """A place in the data of a run.

    Args:
        epoch: number of the epoch.
        steps: batches that each process has received in it.
        samples: samples of the global order that the processes have received; None with a custom batch sampler.
        rng_state: the random state that determines the epoch's order; None when it is unknown before the epoch begins.
        base: torchdata's state at this position; None if the other fields are enough.
    """

    epoch: int
    steps: int
    samples: int | None
    rng_state: RNGState | None = None
    base: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The fields as plain values and tensors."""
        draw = None if self.rng_state is None else self.rng_state.state_dict()
        return {"epoch": self.epoch, "steps": self.steps, "samples": self.samples, "draw": draw, "base": self.base}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Position:
        """Create it from the result of `state_dict`."""
        rng_state = None if state["draw"] is None else RNGState.from_state_dict(state["draw"])
        return cls(state["epoch"], state["steps"], state["samples"], rng_state, state["base"])


class Iteration:
    """The position of one iterator of a loader; several iterators of a loader have one each.

    Attributes:
        epoch: number of its epoch.
        end_of_dataloader: whether the last yielded batch is the last one of the epoch.
        remainder: real samples of an incomplete last step of all processes; 0 when it is complete, -1 when unknown.
        padding: padding of the last yielded step; None when there is none.
        steps: batches received in this epoch, skipped ones included.
        base: torchdata's state after the last yielded batch.
        final_base: torchdata's state at the end of the epoch, once it is known that no batch follows.
        rng_state: the random state that determines the order of its epoch; None when it is unknown.
        kept: the batches that the loop can receive again; None if they are not kept.
        is_taken_back: whether the loop is to receive some again.
    """

    __slots__ = (
        "_first_samples",
        "_first_steps",
        "_promised",
        "_step_size",
        "base",
        "end_of_dataloader",
        "epoch",
        "final_base",
        "is_taken_back",
        "kept",
        "padding",
        "remainder",
        "rng_state",
        "steps",
    )

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.end_of_dataloader = False
        self.remainder = -1
        self.padding: Padding | None = None
        self.base: dict[str, Any] | None = None
        self.final_base: dict[str, Any] | None = None
        self.rng_state: RNGState | None = None
        self.kept: KeptBatches | None = None
        self.is_taken_back = False
        self._promised = -1
        self._step_size: int | None = None
        self.move_to(0, 0)

    def move_to(self, steps: int, samples: int | None) -> None:
        """Set the position, without a batch."""
        self.steps = self._first_steps = steps
        self._first_samples = samples

    def begin(self, steps: int, samples: int | None, step_size: int | None, remainder: int) -> None:
        """Begin at a position.

        Args:
            steps: batches before the first one.
            samples: samples before the first one; None when they have no position.
            step_size: samples of all processes in one step; None when it varies.
            remainder: see `Iteration`; what the reported length promises.
        """
        self.end_of_dataloader = False
        self.base = self.final_base = self.padding = None
        self.remainder = self._promised = remainder
        self._step_size = step_size
        self.move_to(steps, samples)

    def expect(self, number: int) -> None:
        """Set the position to that before a batch, counted from the beginning of the iteration."""
        self.steps = self._first_steps + number

    def take_back(self, left_out: Collection[int]) -> None:
        """Take the loop back to the mark of the kept batches, without those of some numbers."""
        if self.kept is not None:
            self.expect(self.kept.take_back(left_out) + 1)
            self.is_taken_back = True
            self.end_of_dataloader, self.remainder, self.final_base = False, self._promised, None

    @property
    def received(self) -> int:
        """Batches that the training loop has received since the iteration began."""
        return self.steps - self._first_steps

    @property
    def samples(self) -> int | None:
        """Samples of the global order that the processes together have received; None when they have no position."""
        if not self.received:
            return self._first_samples
        if self._first_samples is None or self._step_size is None:
            return None
        missing = self._step_size - self.remainder if self.end_of_dataloader and self.remainder > 0 else 0
        return self._first_samples + self.received * self._step_size - missing


class Progress:
    """The position of a loader, counted in batches that the loop has received; prefetched ones do not count.

    It is that of the iterator which yielded last. When that one ends, it is that of the iterator which yielded last
    among those that are still open.

    Attributes:
        epoch: number of the epoch that runs or comes next.
        iteration: the position of the current iterator; of the last one, if none is open.
        resume: where the next iteration continues, or None when it begins at the beginning.
        replay: the random state from which the next iteration begins, or None when the samplers draw a new one.
        next_rng_state: the random state from which the next epoch begins, if this one was loaded at its end.
    """

    __slots__ = ("_open", "epoch", "iteration", "next_rng_state", "replay", "resume")

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.iteration = Iteration(epoch)
        self.resume: Position | None = None
        self.replay: RNGState | None = None
        self.next_rng_state: RNGState | None = None
        self._open: list[Iteration] = []

    def enter(self) -> Iteration:
        """Open an iteration of the next epoch, which becomes the current one."""
        self.next_rng_state = None
        self.iteration = Iteration(self.epoch)
        self._open.append(self.iteration)
        return self.iteration

    def follow(self, iteration: Iteration) -> None:
        """Make an open iteration the current one, because it yields a batch."""
        self._open.remove(iteration)
        self._open.append(iteration)
        self.iteration = iteration

    def leave(self, iteration: Iteration, finished: bool) -> None:
        """Close an iteration; with `finished` its epoch was read completely, and the loader moves to the next one."""
        self._open.remove(iteration)
        if finished:
            self.epoch = self.epoch + 1
            iteration.epoch = self.epoch
            iteration.move_to(0, 0)
        if self._open:
            self.iteration = self._open[-1]

    def move_to(self, epoch: int, resume: Position | None = None) -> None:
        """Set the epoch of the next iteration, and the position at which it continues, if given."""
        self.epoch = epoch
        self.resume = resume
        self.iteration = Iteration(epoch)

    def take_start(self) -> tuple[Position | None, RNGState | None]:
        """Return position and random state for the next iteration, and clear them for the one after it."""
        start = self.resume, self.replay
        self.resume = self.replay = None
        return start

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the last yielded batch is the last one of the epoch."""
        return self.iteration.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Real samples of an incomplete last step of all processes; 0 when it is complete, -1 when unknown."""
        return self.iteration.remainder

    @property
    def padding(self) -> Padding | None:
        """Padding of the last yielded step; None when there is none."""
        return self.iteration.padding

    @property
    def steps(self) -> int:
        """Batches received in this epoch, skipped ones included."""
        return self.iteration.steps

    @property
    def received(self) -> int:
        """Batches that the training loop has received since the iteration began."""
        return self.iteration.received

    @property
    def samples(self) -> int | None:
        """Samples of the global order that the processes together have received; None when they have no position."""
        return self.iteration.samples

    def position(self, rng_state: RNGState | None) -> Position:
        """The current position in the epoch, with the random state that determines its order."""
        iteration = self.iteration
        # torchdata's state marks the epoch as finished only after a batch beyond the last one was requested.
        base = iteration.final_base or iteration.base
        return Position(
            iteration.epoch, iteration.steps, iteration.samples, rng_state, base if iteration.steps else None
        )
