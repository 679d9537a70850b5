"""The record of a bad step: an event in memory, in the log, in the project folder and in the status record."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from accel_state.watch.goodput import append_line
from accel_state.watch.record import STATUS_RECORD
from accel_torch.step_guard.config import Action

__all__ = ("EVENTS", "LikelyCause", "StepEvent", "tell")

EVENTS: Final = "events.jsonl"
"""File in the project folder, with one line for each bad step."""

LikelyCause = Literal["data", "numerics", "hardware"]

_logger: Final = logging.getLogger(__name__)

_SHOWN: Final = 8
"""Largest number of samples of a process in a text."""


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
        line = self._asdict()
        line["value"] = self.value if math.isfinite(self.value) else str(self.value)
        line["ranks"] = list(self.ranks)
        line["samples"] = {str(rank): list(ids) for rank, ids in self.samples.items()}
        line["batches"] = {str(rank): text for rank, text in self.batches.items()}
        return {"time": line.pop("time") or time.time(), **line}


def tell(event: StepEvent, rank: int) -> None:
    """Log an event on the first process, append it to the project's file, and note it in the status record of all."""
    STATUS_RECORD.bad_step = f"step {event.step}: {event.kind} {event.quantity} ({event.cause}), {event.action}"
    if rank:
        return
    back = "" if event.back_to is None else f" to step {event.back_to}"
    _logger.warning("StepGuard: %s%s. %s %s", event.action, back, event.sentence, event.details)
    if STATUS_RECORD.folder:
        error = append_line(os.path.join(STATUS_RECORD.folder, EVENTS), event.as_json())
        if error is not None:
            _logger.warning("StepGuard: cannot write %s: %s", EVENTS, error)
