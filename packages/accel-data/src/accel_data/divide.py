"""Giving each process its part: of indexed data through the samplers, of a stream through a data set around it."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from accel_data.adapter import rebuilt
from accel_data.indexed import MapSource
from accel_data.iterable import IterableDatasetShard, ResumableShard
from accel_data.padding import MarkingCollate
from accel_data.samplers import (
    BatchSamplerShard,
    SeedableRandomSampler,
    batching_of,
    check_process,
    check_split,
    innermost_sampler,
)
from accel_data.seeding import SampleSeed, SeededStream
from accel_data.stateful import has_state
from accel_data.streamed import StreamSource
from accel_ops.objects import broadcast_object_list

__all__ = ("Part", "Shuffling", "divide_indexed", "divide_stream")

_DRAWING: Final = frozenset({RandomSampler, SubsetRandomSampler, WeightedRandomSampler})
"""Torch's samplers that draw from the generator of the process when they have none of their own."""


@dataclass(frozen=True)
class Part:
    """Which part of the data is asked for.

    Args:
        processes: how many share the data.
        index: which of them this is.
        split: batches are those of all processes together.
        even: fill up the last step.
        readers: how many processes of the run draw its order together, with those that get the same part; 1 where
            each draws for itself.
    """

    processes: int
    index: int
    split: bool = False
    even: bool = True
    readers: int = 1

    def __post_init__(self) -> None:
        check_process(self.processes, self.index)

    @property
    def shared(self) -> bool:
        """Whether somebody else reads in the same order."""
        return self.processes > 1 or self.readers > 1


@dataclass(frozen=True)
class Shuffling:
    """How a data set with indices is shuffled.

    Args:
        seedable: replace torch's `RandomSampler` by one that depends on seed and epoch alone.
        seed: of that one; torch's initial seed when None.
        seed_samples: seed the generators for each sample.
        repeatable: give torch's samplers a generator even in a run of one process, so that an epoch can be drawn again.
        rereads: take a stream that says nothing of itself to give the same samples again, as torchdata does.
    """

    seedable: bool = False
    seed: int | None = None
    repeatable: bool = False
    seed_samples: bool = False
    rereads: bool = False


def divide_indexed(
    loader: DataLoader[Any], part: Part, shuffling: Shuffling
) -> tuple[MapSource, torch.Generator | None]:
    """One process's part of a loader over a data set with indices, and the generator that shuffles it."""
    below: Any = batching_of(loader)
    single = below is None
    if single:
        below = BatchSampler(loader.sampler, 1, False)
    if part.split:
        check_split(None if single else getattr(below, "batch_size", None), part.processes)
    sampler = innermost_sampler(below)
    if sampler is not None and getattr(below, "sampler", None) is sampler:
        replacement = _shuffled(sampler, part, shuffling)
        if replacement is not sampler:
            below = copy.copy(below)
            below.sampler = sampler = replacement
    shard = BatchSamplerShard(below, part.processes, part.index, part.split, part.even)
    changes = {} if loader.batch_sampler is None or sampler is None else {"sampler": sampler}
    source = MapSource.over(loader, shard, _sample_seed(part, shuffling), **changes)
    return source, _generator_of(sampler, below)


def _sample_seed(part: Part, shuffling: Shuffling) -> SampleSeed | None:
    if not shuffling.seed_samples:
        return None
    return SampleSeed(_seed(part, shuffling))


def _seed(part: Part, shuffling: Shuffling) -> int:
    return _agreed(torch.initial_seed(), part) if shuffling.seed is None else shuffling.seed


def _shuffled(sampler: Any, part: Part, shuffling: Shuffling) -> Any:
    # A subclass that draws its indices in its own way keeps doing so.
    if shuffling.seedable and isinstance(sampler, RandomSampler) and type(sampler).__iter__ is RandomSampler.__iter__:
        count = None if sampler.num_samples == len(sampler.data_source) else sampler.num_samples
        seed = _seed(part, shuffling)
        seeded = SeedableRandomSampler(sampler.data_source, sampler.replacement, count, data_seed=seed)
        seeded.generator = sampler.generator
        return seeded
    draws_globally = type(sampler) in _DRAWING and sampler.generator is None
    if not draws_globally or not (part.shared or shuffling.repeatable):
        return sampler
    own = copy.copy(sampler)
    seed = _agreed(int(torch.empty((), dtype=torch.int64).random_().item()), part)
    own.generator = torch.Generator().manual_seed(seed)
    return own


def _agreed(seed: int, part: Part) -> int:
    """The main process's seed, where the processes of the run read together."""
    if part.readers == 1:
        return seed
    agreed: int = broadcast_object_list([seed])[0]
    return agreed


def _generator_of(sampler: Any, batch_sampler: Any) -> torch.Generator | None:
    for holder in (sampler, batch_sampler):
        generator = getattr(holder, "generator", None)
        # A sampler that is seeded anew for each epoch needs nobody to make its generator equal.
        if isinstance(generator, torch.Generator) and not isinstance(holder, SeedableRandomSampler):
            return generator
    return None


def divide_stream(
    loader: DataLoader[Any], part: Part, shuffling: Shuffling
) -> tuple[StreamSource, torch.Generator | None]:
    """One process's part of a loader over a stream that every process reads, and the generator that shuffles it."""
    source, generator = _divided_stream(loader, part, shuffling)
    if shuffling.rereads and source.obstacle() is not None:
        source.rereads = True
        warnings.warn(
            f"The stream {source.identity()} has no position: after a load it is read again from its beginning, "
            "without the batches that are done. Give it state_dict() and load_state_dict(), or set_epoch(epoch), if it "
            "does not give the same samples each time.",
            UserWarning,
            stacklevel=4,
        )
    return source, generator


def _divided_stream(
    loader: DataLoader[Any], part: Part, shuffling: Shuffling
) -> tuple[StreamSource, torch.Generator | None]:
    batch_size = loader.batch_size
    if part.split:
        check_split(batch_size, part.processes)
    generator = getattr(loader.dataset, "generator", None)
    generator = generator if isinstance(generator, torch.Generator) else None
    sample_seed = _sample_seed(part, shuffling)
    if sample_seed is not None:
        loader = rebuilt(loader, dataset=SeededStream.of(loader.dataset, sample_seed))
    if part.processes == 1:
        return StreamSource(loader, 1, batch_size or 1), generator
    kind = ResumableShard if has_state(loader) else IterableDatasetShard
    shard = kind(
        loader.dataset,  # type: ignore[arg-type]
        batch_size or 1,
        loader.drop_last,
        part.processes,
        part.index,
        part.split,
        even_batches=part.even,
        marking=True,
    )
    width = shard.plan().batch_size
    changes: dict[str, Any] = {"dataset": shard, "collate_fn": MarkingCollate(loader.collate_fn)}
    if batch_size is not None:
        changes |= {"batch_size": width, "batch_sampler": BatchSampler(loader.sampler, width, loader.drop_last)}
    return StreamSource(rebuilt(loader, **changes), part.processes, width * part.processes), generator
