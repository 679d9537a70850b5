"""The shard of each batch that a process trains on, and the share of a batch in an optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("BatchShare", "Shards")


@dataclass(frozen=True)
class Shards:
    """The number of shards of each batch of the run, and the index of this process's shard."""

    count: int
    index: int


@dataclass
class BatchShare:
    """The share of one batch in an optimizer step whose batches the backend distributes over the processes.

    Args:
        step: number of the optimizer step.
        samples: samples of this batch that count; 0 if the process has none and only joins the collectives.
        total: samples of the step on all processes.
        members: the number of processes that share the step.
        last: whether this is the process's last batch of the step.

    Attributes:
        accumulated: whether the loop entered `accumulate` for it; set by the Accelerator.
        stepped: whether the loop called an optimizer's `step` for it; set by the Accelerator.

    Example:
        >>> BatchShare(step=0, samples=2, total=8, members=2, last=False).factor
        0.5
    """

    step: int
    samples: int
    total: int
    members: int
    last: bool
    accumulated: bool = False
    stepped: bool = False

    @property
    def factor(self) -> float:
        """Factor for the mean loss of the batch, so that the mean over processes is the mean loss of the step."""
        return self.members * self.samples / self.total
