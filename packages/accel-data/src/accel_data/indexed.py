"""Batches of a data set with indices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Sampler

from accel_data.adapter import opened, rebuilt
from accel_data.names import Indices
from accel_data.order import Draw, Draws, decided_by_epoch, repeatable, upcoming
from accel_data.padding import Padding
from accel_data.plan import shortage
from accel_data.progress import Position
from accel_data.samplers import BatchSamplerShard, batching_of
from accel_data.seeding import SampleSeed, SeededSamples, TaggedBatches
from accel_data.sources import READS_NAMES, length_of
from accel_data.stateful import has_state, is_stateful, steps_in

__all__ = ("MapSource", "OneByOne")


class OneByOne(Sampler[int]):
    """Single indices out of batches of one, for loaders without batching.

    Args:
        shard: gives batches of one index.
    """

    def __init__(self, shard: BatchSampler) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[int]:
        return (batch[0] for batch in self.shard)

    def __len__(self) -> int:
        return len(self.shard)


class MapSource:
    """Batches of a data set with indices.

    Args:
        base: reads them; its (batch) sampler is, or wraps, `shard`.
        shard: this process's part.
        sample_seed: from which samples are seeded, if they are.
    """

    def __init__(self, base: DataLoader[Any], shard: BatchSamplerShard, sample_seed: SampleSeed | None = None) -> None:
        self.base = base
        self.shard = shard
        self.sample_seed = sample_seed
        self._unseen = 0
        self._continues = has_state(base)
        self._epoch = 0

    @classmethod
    def over(
        cls, base: DataLoader[Any], shard: BatchSamplerShard, sample_seed: SampleSeed | None = None, **changes: Any
    ) -> MapSource:
        """One that reads through a loader like `base`, with this process's part as its (batch) sampler.

        Args:
            base: the loader.
            shard: this process's part.
            sample_seed: from which samples are seeded, if they are.
            changes: other attributes of the loader.
        """
        indices = shard if sample_seed is None else TaggedBatches(shard, sample_seed)
        name = "sampler" if base.batch_sampler is None else "batch_sampler"
        changes[name] = OneByOne(indices) if batching_of(base) is None else indices
        if sample_seed is not None and not isinstance(base.dataset, SeededSamples):
            changes["dataset"] = SeededSamples.of(base.dataset)
        return cls(rebuilt(base, **changes), shard, sample_seed)

    @property
    def single(self) -> bool:
        """Whether the loader gives samples without batching them."""
        return batching_of(self.base) is None

    @property
    def draws(self) -> Draws:
        """See `Source`."""
        return self.shard.draws

    @property
    def step_size(self) -> int | None:
        """See `Source`."""
        return None if self.shard.walked else self.shard.step_size

    @property
    def processes(self) -> int:
        """See `Source`."""
        return self.shard.num_processes

    @property
    def counts_steps(self) -> bool:
        """See `Source`."""
        return self.shard.walked

    @property
    def index(self) -> int:
        """See `Source`."""
        return self.shard.process_index

    def missing_from_len(self) -> int:
        """See `Source`."""
        return 0

    def names(self) -> Iterable[Any] | None:
        """See `Source`."""
        length = length_of(self.base.dataset)
        return None if length is None else range(length)

    def named(self, own: bool = False) -> MapSource:
        """See `Source`."""
        shard = self.shard.skipping(0)
        return MapSource.over(self.base, shard, dataset=Indices(self.base.dataset), **READS_NAMES)

    def length(self) -> int | None:
        """See `Source`."""
        if not self.shard.walked:
            return length_of(self.shard.sampler)
        return length_of(self.base.dataset)

    def remainder(self, start: int | None) -> int:
        """See `Source`."""
        length, size = self.length(), self.shard.step_size
        if length is None or not size or self.shard.drop_last:
            return -1
        return max(length - (start or 0), 0) % size

    def shortage(self) -> str | None:
        """See `Source`."""
        shard = self.shard
        return shortage(self.length(), shard.num_processes, shard.pads and not shard.drop_last)

    def steps(self, at: Position | None) -> int | None:
        """See `Source`."""
        shard = self.shard
        if not shard.walked:
            length = length_of(shard.sampler)
            return None if length is None else len(shard.plan(length, None if at is None else at.samples))
        # Which of the batches that are cut has nothing for a process is known when they come.
        if length_of(shard.batch_sampler) is None or (shard.split_batches and not shard.pads):
            return None
        return max(shard.rounds() - (shard.skipped_steps if at is None else at.steps), 0)

    @property
    def pads(self) -> bool:
        """See `Source`."""
        return self.shard.pads and not self.shard.walked

    @property
    def may_be_empty(self) -> bool:
        """True: what the length says was looked at before."""
        return True

    def open(self, at: Position | None) -> Iterator[Any]:
        """See `Source`."""
        self._unseen = 0
        if at is not None and at.base is not None:
            return self._continued(at.steps, at.base)
        position = None if at is None else at.steps if self.shard.walked else at.samples
        self.shard.start_once_at(position)
        return opened(self.base, self._epoch)

    def _continued(self, steps: int, state: dict[str, Any]) -> Iterator[Any]:
        """The rest of an epoch whose data set goes back to its own state; torchdata passes over the indices."""
        self._unseen = steps_in(state) or 0
        before = steps - self._unseen
        self.shard.start_once_at(before if self.shard.walked else before * (self.shard.step_size or 1))
        self.base.load_state_dict(state)  # type: ignore[attr-defined]
        return opened(self.base, self._epoch)

    @property
    def padded(self) -> Collection[int]:
        """See `Source`."""
        return self.shard.padded

    def padding(self, number: int) -> Padding | None:
        """See `Source`."""
        padding = self.shard.padded.get(number + self._unseen)
        if padding is None or not self.single:
            return padding
        return padding.of_single()

    def upcoming(self, restored: Draw | None = None) -> Draw | None:
        """See `Source`."""
        custom = self.shard.batch_sampler if self.shard.walked else None
        return upcoming(custom, self.shard.sampler, restored)

    def set_epoch(self, epoch: int) -> None:
        """See `Source`."""
        self._epoch = epoch
        if self.sample_seed is not None:
            self.sample_seed.epoch = epoch
        for part in (self.base.dataset, self.shard.batch_sampler, self.shard.sampler):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def skipping(self, steps: int) -> MapSource:
        """See `Source`."""
        return self.over(self.base, self.shard.skipping(steps), self.sample_seed)

    def skipped(self) -> tuple[int, int | None]:
        """See `Source`."""
        steps, size = self.shard.skipped_steps, self.step_size
        return steps, None if size is None else steps * size

    @property
    def continues_from_base(self) -> bool:
        """See `Source`."""
        return self._continues

    def base_state(self) -> dict[str, Any] | None:
        """See `Source`."""
        return self.base.state_dict() if is_stateful(self.base) else None  # type: ignore[attr-defined]

    @property
    def self_contained(self) -> bool:
        """See `Source`."""
        return False

    def identity(self) -> str:
        """See `Source`."""
        classes = (type(part) for part in (self.shard.batch_sampler, self.shard.sampler) if part is not None)
        return " over ".join(f"{known.__module__}.{known.__qualname__}" for known in classes)

    def obstacle(self) -> str | None:
        """See `Source`."""
        if repeatable(self.shard.batch_sampler if self.shard.walked else None, self.shard.sampler):
            return None
        return (
            f"The order of {self.identity()} cannot be drawn again: it has neither a generator nor a state of its own."
        )

    def foreign_obstacle(self) -> str | None:
        """See `Source`."""
        if not self.shard.walked and decided_by_epoch(self.shard.sampler):
            return None
        return f"It does not say what the order of {self.identity()} was drawn from."
