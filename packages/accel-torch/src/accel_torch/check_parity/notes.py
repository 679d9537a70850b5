"""The task of one run of a check, and the records of its processes; written and read as files of one folder.

task.json              the task of the processes
rank_0/run.json        facts about the process, and what the script reads
rank_0/step_0.pt       parameters and buffers before the first step
rank_0/step_1.pt       results of the first step
batch_0_0_0_0.pt       a batch that the loop received; the numbers are loader, epoch, batch and shard
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
    """The task of one run.

    Args:
        notes: folder for the records of the processes.
        source: the script. Reads of clocks and ranks in it and in other modules of its folder are recorded.
        steps: optimizer steps to record.
        plan: records of the run under the plan, whose global batches the single process uses; empty under the plan.
        varied: whether clock and seeds are changed, which must not change results.
        rank: the rank that the script reads, for one process.
    """

    notes: str
    source: str
    steps: int
    plan: str = ""
    varied: bool = False
    rank: int = 0

    @property
    def is_reference(self) -> bool:
        """Whether this is the run of one process, after that of the plan."""
        return bool(self.plan)

    def write(self) -> Path:
        """Write the task to its folder, and return the file."""
        path = Path(self.notes, "task.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: str) -> ParityTask:
        """Read the task from a file."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


@dataclass
class RunFacts:
    """Facts about a process and its steps.

    Args:
        rank, world: rank and world size.
        data, data_count: index of the process's shard of each global batch, and the number of shards.
        accumulation: micro-batches of a step.
        precision: name of the mixed precision.
        models, optimizers: the number of prepared ones.
        loaders: the number of prepared ones.
        reads_loader: whether a prepared loader was read.
        without_gradient: parameters that require a gradient but had none, or only zeros, in every step.
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
    """The results of one optimizer step on one process; tensors are full, under their original names.

    Args:
        step: number of the step; 0 is the state before the first one.
        samples: digests of the samples of each batch, as (loader, epoch, digests).
        inputs: digests of the model's inputs, if no prepared loader was read.
        modules: (calls, elements, sum, sum of squares, rows) of the outputs of each module, in the order of the calls.
        losses: the loss of each backward pass.
        gradients: full gradients before clipping.
        norms: the norms that clipping returned.
        clipped: the gradients with which the optimizer stepped, if they were clipped.
        rates: learning rates of all parameter groups.
        parameters, buffers: their values after the step.
        masks: (input, mask, probability, size, module) of each dropout call.
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
    """The records of all processes of one run.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = sorted(folder.glob("rank_*/run.json"), key=lambda path: int(path.parent.name[5:]))
        self.ranks = [RunFacts(**json.loads(path.read_text(encoding="utf-8"))) for path in found]

    def step(self, rank: int, step: int) -> StepNotes | None:
        """The record of a step, or None if the step did not happen."""
        path = step_file(self.folder, rank, step)
        if not path.is_file():
            return None
        return StepNotes(**torch.load(path, map_location="cpu", weights_only=False))

    @property
    def last_step(self) -> int:
        """The last step that all processes recorded with its parameters, or -1."""
        made = []
        for facts in self.ranks:
            step = 0
            while step_file(self.folder, facts.rank, step).is_file():
                step += 1
            made.append(step - 1)
        return min(made, default=-1)


def step_file(folder: Path, rank: int, step: int) -> Path:
    """The record of one step of one process."""
    return folder / f"rank_{rank}" / f"step_{step}.pt"


def batch_file(folder: str, loader: int, epoch: int, batch: int, place: int) -> Path:
    """The file of a batch that the loop received.

    Args:
        folder: the folder of the records.
        loader, epoch, batch: the batch's numbers.
        place: the shard of the global batch.
    """
    return Path(folder, f"batch_{loader}_{epoch}_{batch}_{place}.pt")


def joined(parts: list[Any]) -> Any:
    """Concatenate the shards of a batch: tensors along their first dimension, and lists of other objects.

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
