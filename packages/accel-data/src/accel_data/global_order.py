"""`order="global"`: one sequence of samples for any number of processes and DataLoader workers.

The sequence of an epoch is the batches of its steps, joined by rank. It depends on the seed, the number of the epoch
and the data set alone. A position in it is a number of samples, so a run continues it on another number of processes:
after `start` samples, step i of G samples has the positions start + iG up to start + (i + 1)G (see `ShardPlan`).

This module says which loaders cannot keep such a sequence, so that `prepare_data_loader` refuses them.
"""

from __future__ import annotations

import hashlib
from itertools import islice
from typing import Any, Final

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from accel_data.order import SeedableRandomSampler, decided_by_epoch
from accel_data.source import MapSource, Source
from accel_data.stream_source import StreamSource
from accel_ops.objects import gather_object
from accel_ops.rng import restore, snapshot
from accel_state.errors import Conflict

__all__ = ("check_global_order",)

_COMPARED: Final = 1024
"""Indices of a custom sampler that the processes compare."""


def check_global_order(
    loader: DataLoader[Any], source: Source, own_shard: bool, dispatched: bool, compared: bool
) -> None:
    """Refuse a loader whose order depends on more than the seed, the epoch and the data set.

    Args:
        loader: as the script made it.
        source: of the prepared loader.
        own_shard: whether each process reads a shard of its own.
        dispatched: whether the main process reads for all.
        compared: whether all processes call this, so that they can compare a custom sampler.

    Raises:
        Conflict: the order cannot be a global one; by every process, when a custom sampler differs between them.
    """
    obstacle, remedy = _obstacle(loader, source, own_shard) or ("", "")
    if not obstacle and compared and not dispatched and isinstance(source, MapSource):
        obstacle, remedy = _difference(source.shard.sampler) or ("", "")
    if obstacle:
        needed_by = 'which order="global" and backends whose members may change need'
        raise Conflict(f"Cannot give {source.identity()} a global order, {needed_by}.", obstacle, remedy)


def _obstacle(loader: DataLoader[Any], source: Source, own_shard: bool) -> tuple[str, str] | None:
    """Why the order depends on something else, and what to do; None when it does not."""
    if own_shard:
        return (
            "Each process reads a shard of its own, so the order depends on the number of processes.",
            "Prepare a loader over the whole data set: without a DistributedSampler, sharding='already' or a stream "
            "that is sharded at its source (sharding='dispatch' reads it as a whole).",
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        return (
            "With in_order=False the order depends on the speed of the DataLoader workers.",
            "Leave in_order at True.",
        )
    if isinstance(source, StreamSource):
        return _stream_obstacle(loader, source)
    if not isinstance(source, MapSource):
        return None
    if source.continues_from_base:
        return (
            "The data set continues from a state of its own, which belongs to one process.",
            "Give no use_stateful_dataloader=True, or a data set without state_dict().",
        )
    shard, sampler = source.shard, source.shard.sampler
    if shard.has_custom_batches:
        return (
            "Its batch sampler gives whole batches, so what a step holds depends on the number of processes.",
            "Give the loader a sampler of single indices and a batch_size.",
        )
    if decided_by_epoch(sampler):
        return None
    if isinstance(sampler, RandomSampler) or not hasattr(sampler, "set_epoch"):
        return (
            "Its order depends on more than seed and epoch: the sampler has no method set_epoch(epoch).",
            "Use shuffle=True without use_configured_sampler, or give the sampler set_epoch(epoch), which decides the "
            "order.",
        )
    return None


def _stream_obstacle(loader: DataLoader[Any], source: StreamSource) -> tuple[str, str] | None:
    if loader.num_workers:
        return (
            "DataLoader workers divide a stream in a way of their own, so the order depends on their number.",
            "Use num_workers=0, or a data set with indices.",
        )
    if not hasattr(source.stream, "set_epoch") and source.upcoming_rng() is None:
        return (
            "The stream has no order of its own: neither set_epoch nor a generator says that an epoch gives the same "
            "samples again.",
            "Give the stream a method set_epoch(epoch), which decides the order, or a torch.Generator as `generator`.",
        )
    return None


def _difference(sampler: Any) -> tuple[str, str] | None:
    """What custom samplers of the processes differ in; called by all of them."""
    custom = type(sampler) not in (SequentialSampler, SeedableRandomSampler)
    digest = ""
    if custom:
        generators = snapshot()
        digest = hashlib.blake2b(repr(list(islice(iter(sampler), _COMPARED))).encode()).hexdigest()
        restore(generators)
    everyones = gather_object([digest])
    other = next((rank for rank, theirs in enumerate(everyones) if theirs != everyones[0]), None)
    if other is None:
        return None
    return (
        f"The sampler gives other indices on process {other} than on process 0.",
        "Let the sampler give the indices of all processes, in an order that does not depend on the rank.",
    )
