"""The record of a bad step: an event in memory, in the log, in the project folder and in the status record."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from accel_state.errors import NonFiniteStep, SpikeStep
from accel_state.watch.goodput import append_line
from accel_state.watch.record import STATUS_RECORD
from accel_torch.step_guard.config import Action

__all__ = ("EVENTS", "LikelyCause", "StepEvent")

EVENTS: Final = "events.jsonl"
"""File in the project folder, with one line for each bad step."""

LikelyCause = Literal["data", "numerics", "hardware"]

_logger: Final = logging.getLogger(__name__)

_SHOWN: Final = 8
"""Largest number of samples of a process in a text."""

_REMEDIES: Final[Mapping[str, str]] = {
    "data": "Weights did not change. Look at these samples, or leave such steps out with StepGuard(nonfinite='skip').",
    "numerics": "Weights did not change. Continue from an older checkpoint with a smaller learning rate, or clip "
    "gradients.",
    "hardware": "A bit was probably flipped in memory or on the way. Continue from a checkpoint on another machine.",
}


class StepEvent(NamedTuple):
    """A bad step.

    Args:
        step: number of the optimizer step in the run, from 1, over all its restarts.
        kind: "nonfinite" or "spike".
        action: what was done.
        cause: "data", "numerics" or "hardware".
        quantity: what was bad: "loss" or "norm".
        value: the mean loss over the processes, or the total gradient norm.
        limit: the limit that a spike exceeded; None for a value that is not finite.
        ranks: the processes on which it was bad.
        samples: ids of the samples of the step, by rank; of the processes in `ranks`, as far as they are known.
        batches: where these samples are in the loaders, as text by rank; for samples without ids.
        module: the first module whose output was not finite; None if it was not searched, or there is none.
        optimizer: index of the optimizer, in the order of preparation.
        back_to: the number of the step to which a rollback returned; else None.
        time: when the step was judged, in seconds since 1970.
    """

    step: int
    kind: Literal["nonfinite", "spike"]
    action: Action
    cause: LikelyCause
    quantity: Literal["loss", "norm"]
    value: float
    limit: float | None
    ranks: Sequence[int]
    samples: Mapping[int, Sequence[str]] = {}
    batches: Mapping[int, str] = {}
    module: str | None = None
    optimizer: int = 0
    back_to: int | None = None
    time: float = 0.0

    @property
    def sentence(self) -> str:
        """What was bad, in one sentence."""
        name = "loss" if self.quantity == "loss" else "gradient norm"
        where = f"process {self.ranks[0]}" if len(self.ranks) == 1 else f"processes {', '.join(map(str, self.ranks))}"
        bad = f"above the limit of {self.limit:.6g}" if self.limit is not None else "not finite"
        return f"The {name} of step {self.step} was {self.value:.6g}, {bad}, on {where}."

    @property
    def details(self) -> str:
        """The likely cause, the module and the samples, in sentences."""
        texts = [f"Likely cause: {self.cause}."]
        if self.module is not None:
            texts.append(f"The first module whose output was not finite is {self.module!r}.")
        for rank in self.ranks:
            ids, batches = list(self.samples.get(rank, ())), self.batches.get(rank, "")
            if ids:
                more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
                texts.append(f"Samples of process {rank}: {', '.join(ids[:_SHOWN])}{more}.")
            elif batches:
                texts.append(f"Data of process {rank}: {batches}.")
        return " ".join(texts)

    def as_json(self) -> dict[str, Any]:
        """The line of `events.jsonl`; JSON has no NaN and no infinity, which are texts there."""
        value = self.value if math.isfinite(self.value) else str(self.value)
        return {**self._asdict(), "value": value}

    def error(self, in_a_row: int = 0) -> NonFiniteStep | SpikeStep:
        """The error of a step that raises.

        Args:
            in_a_row: the number of bad steps in a row, if there were too many.
        """
        again = f" It is bad step number {in_a_row} in a row (max_consecutive)." if in_a_row else ""
        failure = f"Cannot make step {self.step}.{again}"
        obstacle = f"{self.sentence} {self.details}"
        ids = [sample for ids in self.samples.values() for sample in ids]
        if self.kind == "nonfinite":
            return NonFiniteStep(failure, obstacle, _REMEDIES[self.cause], self.cause, ids)
        return SpikeStep(failure, obstacle, _REMEDIES[self.cause], self.cause, ids)

    def tell(self, rank: int, folder: str | None) -> None:
        """Note it in the status record; on the first process, log it and append it to the project's file.

        Args:
            rank: rank of this process.
            folder: the project's folder, if there is one.
        """
        STATUS_RECORD.bad_step = f"step {self.step}: {self.kind} {self.quantity} ({self.cause}), {self.action}"
        if rank:
            return
        back = "" if self.back_to is None else f" to step {self.back_to}"
        _logger.warning("StepGuard: %s%s. %s %s", self.action, back, self.sentence, self.details)
        if folder is not None:
            error = append_line(os.path.join(folder, EVENTS), self.as_json())
            if error is not None:
                _logger.warning("StepGuard: cannot write %s: %s", EVENTS, error)
