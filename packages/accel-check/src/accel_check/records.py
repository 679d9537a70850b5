"""What one process of a run recorded, as files of a folder: one for the process, and one for each optimizer step.

rank_0/facts.pt       facts about the process
rank_0/start_0.pt     parameters and buffers before the first step
rank_0/step_1.pt      what the first call of an optimizer's `step` saw
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ("OutputSums", "RankFacts", "Records", "StartRecord", "StepRecord", "TensorPart", "values_of", "write_record")


class TensorPart(NamedTuple):
    """The part of a tensor that a process has.

    Args:
        local: the part.
        shape: the shape of the whole tensor.
        offset: where the part begins in the whole tensor; None if the process has the whole tensor.
    """

    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...] | None = None


@dataclass
class OutputSums:
    """Sums over what a module returned in one step.

    Args:
        calls: the number of calls.
        elements: the number of elements.
        total: their sum.
        squares: the sum of their squares.
        features: their sum over all dimensions but the last.
    """

    calls: int = 0
    elements: int = 0
    total: float = 0.0
    squares: float = 0.0
    features: Tensor | None = None


@dataclass
class StartRecord:
    """Parameters and buffers before the first step that uses them."""

    parameters: dict[str, TensorPart] = field(default_factory=dict)
    buffers: dict[str, TensorPart] = field(default_factory=dict)


@dataclass
class StepRecord:
    """What happened up to one call of an optimizer's `step`, since the call before.

    Args:
        optimizer: the number of the optimizer, in the order of first steps.
        number: the number of this optimizer's step, from 1.
        samples: digests of the samples of each batch.
        feeds: the place in the script that read each batch.
        rows: digests of the rows that entered a model, if no loader was read.
        losses: the losses handed to `backward`.
        divisors: by what the script has divided each of them.
        unsynchronised: for each backward pass, whether a replicated model did not synchronise.
        outputs: sums of the outputs of each module, in the order of the calls.
        after_backward: gradients after the last backward pass, where they differ from those at the step.
        before_clip: gradients before they were clipped.
        gradients: gradients at the step.
        norms: the norms that clipping returned.
        rates: the learning rates of all parameter groups.
        parameters, buffers: their values after the step.
        drew: whether the script drew random numbers between its batch and the step.
        dropout: the first module with active dropout, and a digest of the generator there.
        state: digests of the state before the first forward, by group and path; see `accel_check.training_state`.
        digests: digests of the gradients at the step.
        variables: digests of variables of the script, and whether each keeps a state.
    """

    optimizer: int = 0
    number: int = 0
    samples: list[list[str]] = field(default_factory=list)
    feeds: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    divisors: list[float] = field(default_factory=list)
    unsynchronised: list[bool] = field(default_factory=list)
    outputs: dict[str, OutputSums] = field(default_factory=dict)
    after_backward: dict[str, TensorPart] = field(default_factory=dict)
    before_clip: dict[str, TensorPart] = field(default_factory=dict)
    gradients: dict[str, TensorPart] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    parameters: dict[str, TensorPart] = field(default_factory=dict)
    buffers: dict[str, TensorPart] = field(default_factory=dict)
    drew: bool = False
    dropout: tuple[str, str] | None = None
    state: dict[str, dict[str, str]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    variables: dict[str, tuple[str, bool]] = field(default_factory=dict)


@dataclass
class RankFacts:
    """Facts about one process.

    Args:
        rank, world: rank and world size.
        alike: the ranks that read the same samples as this one on purpose (tensor, context and sequence parallelism).
        shards_known: whether the library or a device mesh says which ranks are shards of the data.
        reads_loader: whether a loader was read.
        models: the number of models.
        remarks: what one process does as well, in sentences.
        written: files that the script wrote outside of the checked calls.
        low_precision: whether a gradient has 16 bits.
        more: further facts, by name, of the sessions of our Accelerator and of checks of resumed runs.
    """

    rank: int = 0
    world: int = 1
    alike: tuple[int, ...] = (0,)
    shards_known: bool = False
    reads_loader: bool = False
    models: int = 0
    remarks: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    low_precision: bool = False
    more: dict[str, Any] = field(default_factory=dict)


def write_record(path: Path, value: Any) -> None:
    """Write a record under a name that appears when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    torch.serialization.save(value, new)
    new.replace(path)


def read(path: Path) -> Any:
    """Read what `torch.save` wrote into a file of the check, with its classes: the check itself wrote it."""
    return torch.serialization.load(path, map_location="cpu", weights_only=False)


class Records:
    """The records of all processes of one run.

    Args:
        folder: the folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = sorted(folder.glob("rank_*/facts.pt"), key=lambda path: int(path.parent.name[5:]))
        self.ranks: list[RankFacts] = [read(path) for path in paths]

    def step(self, rank: int, index: int) -> StepRecord:
        """The record of a call of `step`, from 1."""
        record: StepRecord = read(self.folder / f"rank_{rank}" / f"step_{index}.pt")
        return record

    def steps(self, index: int) -> list[StepRecord]:
        """The records of a call of `step` on all ranks."""
        return [self.step(facts.rank, index) for facts in self.ranks]

    @property
    def calls(self) -> int:
        """The number of calls of `step` that every rank recorded."""
        return min((len(list(self.folder.glob(f"rank_{one.rank}/step_*.pt"))) for one in self.ranks), default=0)

    def start(self) -> list[StartRecord]:
        """The state before the first step, on all ranks."""
        starts = []
        for facts in self.ranks:
            start = StartRecord()
            for path in sorted((self.folder / f"rank_{facts.rank}").glob("start_*.pt")):
                one: StartRecord = read(path)
                start.parameters |= one.parameters
                start.buffers |= one.buffers
            starts.append(start)
        return starts

    def representatives(self) -> list[RankFacts]:
        """One rank of each group that reads the same samples."""
        return [facts for facts in self.ranks if facts.rank == min(facts.alike)]


def values_of(pieces: Sequence[TensorPart | None]) -> list[Tensor | None]:
    """The values of a tensor: one for each rank that has the whole, or those that the parts of all ranks make.

    Parts that several ranks have make two values if these ranks differ.
    """
    if all(piece is None or piece.offset is None for piece in pieces):
        return [None if piece is None else piece.local for piece in pieces]
    parts = [piece for piece in pieces if piece is not None]
    first, last = _assembled(parts[::-1]), _assembled(parts)
    return [first] if torch.equal(first, last) else [first, last]


def _assembled(parts: Sequence[TensorPart]) -> Tensor:
    whole = torch.full(parts[0].shape, math.nan, dtype=parts[0].local.dtype)
    for part in parts:
        if part.local.numel():
            begin = part.offset or (0,) * part.local.ndim
            whole[tuple(slice(at, at + size) for at, size in zip(begin, part.local.shape, strict=True))] = part.local
    return whole
