"""torchdata's loader as it was made: its own state says where it stands and in which order it reads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from accel_data.adapter import opened
from accel_data.indexed import MapSource
from accel_data.progress import Position
from accel_data.samplers import BatchSamplerShard, batching_of

__all__ = ("SelfContained",)


class SelfContained(MapSource):
    """Batches of a data set with indices, read through torchdata's loader with the samplers that it was made with.

    Args:
        base: the loader.
    """

    def __init__(self, base: DataLoader[Any]) -> None:
        super().__init__(base, BatchSamplerShard(batching_of(base) or BatchSampler(base.sampler, 1, False)))

    @property
    def counts_steps(self) -> bool:
        """True: torchdata counts batches."""
        return True

    def steps(self, at: Position | None) -> int | None:
        """See `Source`."""
        return super().steps(None) if at is None else None

    def open(self, at: Position | None) -> Iterator[Any]:
        """See `Source`."""
        if at is not None and at.base is not None:
            self.base.load_state_dict(at.base)  # type: ignore[attr-defined]
            return opened(self.base, self._epoch)
        # Batches left out are read all the same: torchdata counts what it reads.
        skipped = self.shard.skipped_steps if at is None else at.steps
        batches = opened(self.base, self._epoch)
        return islice(batches, skipped, None) if skipped else batches

    def skipping(self, steps: int) -> SelfContained:
        """See `Source`."""
        other = copy.copy(self)
        other.shard = self.shard.skipping(steps)
        return other

    def missing_from_len(self) -> int:
        """See `Source`."""
        return self.shard.skipped_steps

    @property
    def continues_from_base(self) -> bool:
        """True."""
        return True

    @property
    def self_contained(self) -> bool:
        """True."""
        return True

    def foreign_obstacle(self) -> str | None:
        """None: a state of torchdata's holds those of the samplers."""
        return None
