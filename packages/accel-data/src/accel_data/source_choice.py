"""Chooses the source that reads a loader whose samplers are already those of this process."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accel_data.sharding import BatchSamplerShard, batching_of
from accel_data.source import LocalSource, MapSource, SelfContainedSource
from accel_data.stateful import knows_its_order
from accel_data.stream_source import StreamSource

__all__ = ("source_of",)


def source_of(loader: DataLoader[Any]) -> LocalSource:
    """The source of a loader whose samplers are already those of this process."""
    contained = knows_its_order(loader)
    if isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, 1, loader.batch_size, self_contained=contained)
    if contained:
        return SelfContainedSource(loader)
    batching = batching_of(loader)
    if isinstance(batching, BatchSamplerShard):
        return MapSource(loader, batching)
    return MapSource.reading(loader, BatchSamplerShard(batching or BatchSampler(loader.sampler, 1, False)))
