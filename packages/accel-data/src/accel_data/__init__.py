"""Data loaders that give each process its own shard, dispatch from one process, and resume exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel_data.adapter import DataLoaderAdapter as DataLoaderAdapter
    from accel_data.auditing import Audit as Audit
    from accel_data.auditing import audit as audit
    from accel_data.config import DataLoaderConfiguration as DataLoaderConfiguration
    from accel_data.dispatch import DataLoaderDispatcher as DataLoaderDispatcher
    from accel_data.loader import DataLoaderShard as DataLoaderShard
    from accel_data.loader import DataLoaderStateMixin as DataLoaderStateMixin
    from accel_data.loader import PreparedLoader as PreparedLoader
    from accel_data.mixture import MixtureDataset as MixtureDataset
    from accel_data.mixture import MixtureStream as MixtureStream
    from accel_data.mixture import SourceCount as SourceCount
    from accel_data.order import SeedableRandomSampler as SeedableRandomSampler
    from accel_data.padding import drop_padding as drop_padding
    from accel_data.prepare import get_sampler as get_sampler
    from accel_data.prepare import prepare_data_loader as prepare_data_loader
    from accel_data.progress import Position as Position
    from accel_data.progress import Progress as Progress
    from accel_data.sharding import BatchSamplerShard as BatchSamplerShard
    from accel_data.sharding import Padding as Padding
    from accel_data.sharding import ShardPlan as ShardPlan
    from accel_data.sharding import SkipBatchSampler as SkipBatchSampler
    from accel_data.skip import SkipDataLoader as SkipDataLoader
    from accel_data.skip import skip_first_batches as skip_first_batches
    from accel_data.streams import IterableDatasetShard as IterableDatasetShard

__all__ = (
    "Audit",
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "MixtureDataset",
    "MixtureStream",
    "Padding",
    "Position",
    "PreparedLoader",
    "Progress",
    "SeedableRandomSampler",
    "ShardPlan",
    "SkipBatchSampler",
    "SkipDataLoader",
    "SourceCount",
    "audit",
    "drop_padding",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
)

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "accel_data.adapter": ("DataLoaderAdapter",),
        "accel_data.auditing": ("Audit", "audit"),
        "accel_data.config": ("DataLoaderConfiguration",),
        "accel_data.dispatch": ("DataLoaderDispatcher",),
        "accel_data.loader": ("DataLoaderShard", "DataLoaderStateMixin", "PreparedLoader"),
        "accel_data.mixture": ("MixtureDataset", "MixtureStream", "SourceCount"),
        "accel_data.order": ("SeedableRandomSampler",),
        "accel_data.padding": ("drop_padding",),
        "accel_data.prepare": ("get_sampler", "prepare_data_loader"),
        "accel_data.progress": ("Position", "Progress"),
        "accel_data.sharding": ("BatchSamplerShard", "Padding", "ShardPlan", "SkipBatchSampler"),
        "accel_data.skip": ("SkipDataLoader", "skip_first_batches"),
        "accel_data.streams": ("IterableDatasetShard",),
    },
)
