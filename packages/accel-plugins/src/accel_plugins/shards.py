"""The shard of each batch that a process trains on."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("Shards", "StepShards")


@dataclass(frozen=True)
class Shards:
    """The number of shards of each batch of the run, and the index of this process's shard."""

    count: int
    index: int


@dataclass(frozen=True)
class StepShards(Shards):
    """How the samples of one optimizer step are sharded, when the number of processes may change between steps.

    Args:
        number: optimizer steps that the run has completed. It determines the samples: a repeated step has the same
            number and the same samples.
        batches: single-process batches in every step, whatever `count` is; with fewer processes, each accumulates more
            batches.
    """

    number: int
    batches: int
