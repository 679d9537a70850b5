"""What one run of a check does, and what its processes note; written and read as files of one folder.

task.json              what the processes do
rank_0/run.json        what the process is, and what the script reads
rank_0/step_0.pt       before the first step: parameters and buffers
rank_0/step_1.pt       what the first step computed
batch_0_0_0_0.pt       loader, epoch, batch, place of the data: what the loop was given
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ("ParityTask", "RunFacts", "RunNotes", "StepNotes", "batch_file", "joined")


@dataclass(frozen=True)
class ParityTask:
    """One run.

    Args:
        notes: folder for the notes of the processes.
        source: file whose reads of clocks and ranks are noted, and those of the modules beside it.
        steps: optimizer steps to note.
        plan: notes of the run under the plan, whose global batches one process is to compute; empty under the plan.
        varied: whether the clock and the seeds of generators are others, which must not matter.
        rank: which process the script believes it is, in one process.
    """

    notes: str
    source: str
    steps: int
    plan: str = ""
    varied: bool = False
    rank: int = 0

    @property
    def is_reference(self) -> bool:
        """Whether one process computes what the plan computed."""
        return bool(self.plan)

    def write(self) -> Path:
        """Write the task into its folder; the file."""
        path = Path(self.notes, "task.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str) -> ParityTask:
        """Read the task of a file."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


@dataclass
class RunFacts:
    """What a process is, and what it found before and during its steps.

    Args:
        rank, world: of the process.
        data, data_count: which slice of each global batch it has, of how many.
        accumulation: micro-batches of a step.
        precision: name of the mixed precision.
        models, optimizers: how many were prepared.
        loaders: how many were prepared.
        reads_loader: whether one of them was read.
        without_gradient: parameters that require a gradient and had none, or only zeros, in every step.
        reads: (what, place) of clocks, ranks and unseeded generators that the script reads.
        drew: steps in which the script drew random numbers between the batch and the step.
    """

    rank: int = 0
    world: int = 1
    data: int = 0
    data_count: int = 1
    accumulation: int = 1
    precision: str = "no"
    models: int = 0
    optimizers: int = 0
    loaders: int = 0
    reads_loader: bool = False
    without_gradient: list[str] = field(default_factory=list)
    reads: list[list[str]] = field(default_factory=list)
    drew: list[int] = field(default_factory=list)


@dataclass
class StepNotes:
    """What one optimizer step computed in one process; tensors are complete, under the names of the user's model.

    Args:
        step: its number; 0 is the state before the first one.
        samples: digests of the samples of each batch, as (loader, epoch, digests).
        inputs: digests of what the model was called with, where no prepared loader was read.
        modules: (calls, elements, sum, sum of squares, rows) of the outputs of each module, in the order of the calls.
        losses: of each backward.
        gradients: complete, before clipping.
        norms: what clipping returned.
        clipped: gradients with which the optimizer stepped, where they were clipped.
        rates: learning rates of all groups.
        parameters, buffers: after the step.
        masks: (input, mask, probability, size, module) of each dropout, by call.
    """

    step: int
    samples: list[tuple[int, int, list[str]]] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    modules: dict[str, list[float]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    clipped: dict[str, Tensor] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    masks: list[list[Any]] = field(default_factory=list)


class RunNotes:
    """What the processes of one run noted.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = sorted(folder.glob("rank_*/run.json"), key=lambda path: int(path.parent.name[5:]))
        self.ranks = [RunFacts(**json.loads(path.read_text(encoding="utf-8"))) for path in found]

    def step(self, rank: int, step: int) -> StepNotes | None:
        """The notes of a step, or None where it was not made."""
        path = step_file(self.folder, rank, step)
        if not path.is_file():
            return None
        return StepNotes(**torch.load(path, map_location="cpu", weights_only=False))

    @property
    def last_step(self) -> int:
        """The last step that all processes noted with its parameters; -1 where none was."""
        made = []
        for facts in self.ranks:
            step = 0
            while step_file(self.folder, facts.rank, step).is_file():
                step += 1
            made.append(step - 1)
        return min(made, default=-1)


def step_file(folder: Path, rank: int, step: int) -> Path:
    """The notes of one step of one process."""
    return folder / f"rank_{rank}" / f"step_{step}.pt"


def batch_file(folder: str, loader: int, epoch: int, batch: int, place: int) -> Path:
    """A batch that the loop was given.

    Args:
        folder: of the notes.
        loader, epoch, batch: which one.
        place: slice of the global batch.
    """
    return Path(folder, f"batch_{loader}_{epoch}_{batch}_{place}.pt")


def joined(parts: list[Any]) -> Any:
    """Slices of a batch as one: tensors joined along their first dimension, lists of other things one after the other.

    Raises:
        RuntimeError: tensors differ in their other dimensions.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts) if first.ndim else first
    if isinstance(first, dict):
        made = {key: joined([part[key] for part in parts]) for key in first}
        return made if type(first) is dict else _like(first, made)
    if isinstance(first, (list, tuple)):
        if any(isinstance(item, (Tensor, dict, list, tuple)) for item in first):
            items = [joined(list(column)) for column in zip(*parts, strict=True)]
        else:
            items = [item for part in parts for item in part]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return first


def _like(first: Any, made: dict[Any, Any]) -> Any:
    """A mapping of the type of another one, such as the BatchEncoding of transformers."""
    return type(first)(made)
