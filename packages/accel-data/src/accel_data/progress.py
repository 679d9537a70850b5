"""The position of a loader: the object that metrics, accumulation and checkpoints read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_data.order import RNGState
from accel_data.sharding import Padding

__all__ = ("EpochInfo", "Position", "Progress")


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
        """The inverse of `state_dict`."""
        rng_state = None if state["draw"] is None else RNGState.from_state_dict(state["draw"])
        return cls(state["epoch"], state["steps"], state["samples"], rng_state, state["base"])


@dataclass(frozen=True)
class EpochInfo:
    """Facts about an epoch, or the rest of one, before it is read.

    Args:
        length: samples of the whole epoch; None when unknown.
        remainder: real samples of an incomplete last step; 0 when it is complete, -1 when unknown or dropped.
        batches: this process's number of batches, if the reported length is correct; None without a length.
        shortage: why a process would have no samples, or None.
    """

    length: int | None
    remainder: int
    batches: int | None
    shortage: str | None


class Progress:
    """The position of a loader, counted in batches that the loop has received; prefetched ones do not count.

    Attributes:
        epoch: number of the epoch that runs or comes next.
        end_of_dataloader: whether the last yielded batch is the last one of the epoch.
        remainder: real samples of an incomplete last step of all processes; 0 when it is complete, -1 when unknown.
        padding: padding of the last yielded step; None when there is none.
        steps: batches received in this epoch, skipped ones included.
        base: torchdata's state after the last yielded batch.
        final_base: torchdata's state at the end of the epoch, once it is known that no batch follows.
        resume: where the next iteration continues, or None when it begins at the beginning.
        replay: the random state from which the next iteration begins, or None when the samplers draw a new one.
        following: the random state of the epoch after this one, when this one was restored after its last batch.
    """

    __slots__ = (
        "_base_samples",
        "_base_steps",
        "_length",
        "_step_size",
        "base",
        "end_of_dataloader",
        "epoch",
        "final_base",
        "following",
        "padding",
        "remainder",
        "replay",
        "resume",
        "steps",
    )

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.end_of_dataloader = False
        self.remainder = -1
        self.padding: Padding | None = None
        self.resume: Position | None = None
        self.replay: RNGState | None = None
        self.following: RNGState | None = None
        self.base: dict[str, Any] | None = None
        self.final_base: dict[str, Any] | None = None
        self.steps = 0
        self._base_steps = 0
        self._base_samples: int | None = 0
        self._step_size: int | None = None
        self._length: int | None = None

    def begin(self, steps: int, samples: int | None, step_size: int | None, length: int | None, remainder: int) -> None:
        """Begin an iteration.

        Args:
            steps: batches before its first one.
            samples: samples before its first one; None when they have no position.
            step_size: samples of all processes in one step; None when it varies.
            length: samples of the epoch; None when unknown.
            remainder: see `Progress`.
        """
        self.end_of_dataloader = False
        self.following = self.base = self.final_base = None
        self.remainder = remainder
        self.padding = None
        self.steps = self._base_steps = steps
        self._base_samples = samples
        self._step_size = step_size
        self._length = length

    def finish(self) -> None:
        """End a completely read epoch and move to the next one."""
        self.move_to(self.epoch + 1)

    @property
    def received(self) -> int:
        """Batches that the training loop has received since the iteration began."""
        return self.steps - self._base_steps

    @property
    def samples(self) -> int | None:
        """Samples of the global order that the processes together have received; None when they have no position."""
        if self.steps == self._base_steps:
            return self._base_samples
        if self._base_samples is None or self._step_size is None:
            return None
        samples = self._base_samples + (self.steps - self._base_steps) * self._step_size
        return samples if self._length is None else min(samples, self._length)

    def position(self, rng_state: RNGState | None) -> Position:
        """The current position in the epoch, with the random state that determines its order."""
        # torchdata's state marks the epoch as finished only after a batch beyond the last one was requested.
        base = self.final_base or self.base
        return Position(self.epoch, self.steps, self.samples, rng_state, base if self.steps else None)

    def move_to(self, epoch: int, resume: Position | None = None) -> None:
        """Set the epoch of the next iteration, and the position at which it continues, if given."""
        self.epoch = epoch
        self.resume = resume
        self.steps = self._base_steps = 0
        self._base_samples = 0

    def take_start(self) -> tuple[Position | None, RNGState | None]:
        """Return position and random state for the next iteration, and clear them for the one after it."""
        start = self.resume, self.replay
        self.resume = self.replay = None
        return start
