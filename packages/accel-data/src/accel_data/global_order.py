"""`order="global"`: one sequence of samples for any number of processes and DataLoader workers.

The sequence of an epoch is the batches of its steps, concatenated by rank. It depends only on the seed, the epoch and
the data set. A position in it is a number of samples, so a run can continue on another number of processes: after
`start` samples, step i of G samples has the positions start + iG up to start + (i + 1)G (see `ShardPlan`).

This module finds the loaders that do not have such a sequence, for which `prepare_data_loader` raises an error. Whether
a custom sampler yields the same indices on all processes is compared when the first epoch begins, as in every loader.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, RandomSampler

from accel_data.order import decided_by_epoch
from accel_data.own_shards import OwnShardSource
from accel_data.source import MapSource, Source
from accel_data.stream_source import StreamSource
from accel_state.errors import Conflict

__all__ = ("check_global_order",)


def check_global_order(loader: DataLoader[Any], source: Source) -> None:
    """Check that the order of a loader depends only on the seed, the epoch and the data set.

    Args:
        loader: the script's loader.
        source: the source of the prepared loader.

    Raises:
        Conflict: the order depends on more.
    """
    obstacle, remedy = _obstacle(loader, source) or ("", "")
    if obstacle:
        needed_by = 'which order="global" and some backends need'
        raise Conflict(f"Cannot give {source.local.identity()} a global order, {needed_by}.", obstacle, remedy)


def _obstacle(loader: DataLoader[Any], source: Source) -> tuple[str, str] | None:
    """Why the order depends on something else, and the remedy; None if it does not."""
    if isinstance(source, OwnShardSource):
        return (
            "Each process reads its own shard, so the order depends on the number of processes.",
            "Prepare a loader over the whole data set: without a DistributedSampler, sharding='already' or a stream "
            "that is sharded at its source (sharding='dispatch' reads it as a whole).",
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        return (
            "With in_order=False the order depends on the speed of the DataLoader workers.",
            "Use in_order=True, the default.",
        )
    local = source.local
    if isinstance(local, StreamSource):
        return _stream_obstacle(loader, local)
    if not isinstance(local, MapSource):
        return None
    if local.continues_from_base:
        return (
            "The data set has its own state_dict(), which belongs to one process.",
            "Remove use_stateful_dataloader=True, or use a data set without state_dict().",
        )
    shard, sampler = local.shard, local.shard.sampler
    if shard.has_custom_batches:
        return (
            "Its batch sampler yields whole batches, so the samples of a step depend on the number of processes.",
            "Give the loader a sampler of single indices and a batch_size.",
        )
    if decided_by_epoch(sampler):
        return None
    if isinstance(sampler, RandomSampler) or not hasattr(sampler, "set_epoch"):
        return (
            "Its order depends on more than seed and epoch: the sampler has no method set_epoch(epoch).",
            "Use shuffle=True without use_configured_sampler, or add a method set_epoch(epoch) that determines the "
            "order.",
        )
    return None


def _stream_obstacle(loader: DataLoader[Any], source: StreamSource) -> tuple[str, str] | None:
    if loader.num_workers:
        return (
            "DataLoader workers shard a stream themselves, so the order depends on their number.",
            "Use num_workers=0, or a map-style data set.",
        )
    if not hasattr(source.stream, "set_epoch") and source.upcoming_rng() is None:
        return (
            "The order of the stream may not be repeatable: it has neither set_epoch nor a generator.",
            "Add a method set_epoch(epoch) that determines the order, or a torch.Generator as attribute `generator`.",
        )
    return None
