"""Which samples of a batch are those of a process."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("Shards", "StepShards")


@dataclass(frozen=True)
class Shards:
    """Into how many slices each batch of the run is cut, and which slice is this process's."""

    count: int
    index: int


@dataclass(frozen=True)
class StepShards(Shards):
    """Who shares the samples of one optimizer step, where that changes between two steps.

    Args:
        number: optimizer steps that the run has made before this one. Samples follow it: a step that is repeated has
            the number it had, and its samples.
        batches: batches of one process that every step has, whatever `count` is; processes that are missing are made
            up for by more accumulation.
    """

    number: int
    batches: int
