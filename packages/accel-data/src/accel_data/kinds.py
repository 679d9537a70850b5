"""The kind of a prepared loader: who reads what. It is decided once, when the loader is prepared."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from accel_data.config import DataLoaderConfiguration
from accel_data.sharding import batching_of, check_process, innermost_sampler
from accel_data.streams import is_sharded, shards_itself
from accel_state import current
from accel_state.errors import Conflict

__all__ = ("LoaderKind", "Shard", "classify", "distributed_sampler", "get_sampler")


@dataclass(frozen=True)
class Shard:
    """This process's shard of the data.

    Args:
        processes: the number of processes that share the data.
        index: the index of this process among them.
        readers: the number of processes that draw a common order, including those with the same shard; 1 if each draws
            its own.
        everyone: whether all processes of the run take part.
    """

    processes: int
    index: int
    readers: int = 1
    everyone: bool = True

    def __post_init__(self) -> None:
        check_process(self.processes, self.index)

    @property
    def shared(self) -> bool:
        """Whether another process reads in the same order."""
        return self.processes > 1 or self.readers > 1


class LoaderKind(Enum):
    """Who reads what.

    MAP: a map-style data set; each process draws the indices of all, and reads its own.
    STREAM: a stream; each process reads all of it, and keeps its own samples.
    OWN_SHARD: the loader already has this process's shard, or the stream gives it.
    DISPATCHED: the main process reads for all.
    """

    MAP = "map"
    STREAM = "stream"
    OWN_SHARD = "own shard"
    DISPATCHED = "dispatched"


def classify(
    loader: DataLoader[Any], shard: Shard, configuration: DataLoaderConfiguration, put_on_device: bool
) -> LoaderKind:
    """The kind of a loader.

    Args:
        loader: the script's loader.
        shard: this process's shard of the data.
        configuration: how loaders are prepared.
        put_on_device: whether batches are moved to the device. Only then streams are dispatched by themselves.

    Raises:
        Conflict: the configuration is not possible for this loader.
    """
    is_stream = isinstance(loader.dataset, IterableDataset)
    sharding, dispatches = configuration.sharding, configuration.dispatch_batches
    if dispatches or sharding == "dispatch":
        if not shard.everyone:
            raise Conflict(
                f"Cannot dispatch to {shard.processes} processes.",
                f"The run has {current.process_or_start().world_size}, and the main process sends to each of them.",
                "Remove num_processes and process_index, or let every process read its own batches.",
            )
        if is_stream and shard.processes > 1 and is_sharded(loader.dataset):
            raise Conflict(
                f"Cannot dispatch the stream {type(loader.dataset).__name__}.",
                "It is divided by rank already, so the samples of all processes but the main one would be lost.",
                "Remove dispatch_batches and sharding='dispatch', or give a stream that is not divided.",
            )
        return LoaderKind.DISPATCHED
    if not is_stream:
        if callable(sharding):
            raise Conflict(
                "Cannot use a function as sharding for a map-style data set.",
                "Functions shard streams; a map-style data set is sharded through the sampler.",
                "Use sharding='auto' for this loader.",
            )
        own = shard.processes > 1 and (
            sharding == "already" or distributed_sampler(loader, shard.processes) is not None
        )
        return LoaderKind.OWN_SHARD if own else LoaderKind.MAP
    own = configuration.exact_epochs or shards_itself(loader.dataset, shard.processes, sharding)
    if callable(sharding) or (shard.processes > 1 and own):
        return LoaderKind.OWN_SHARD
    undecided = dispatches is None and sharding == "auto" and put_on_device
    return LoaderKind.DISPATCHED if undecided and shard.everyone and shard.processes > 1 else LoaderKind.STREAM


def distributed_sampler(loader: DataLoader[Any], processes: int) -> DistributedSampler[Any] | None:
    """Torch's `DistributedSampler`, if the script shards the indices itself."""
    sampler = get_sampler(loader)
    return sampler if isinstance(sampler, DistributedSampler) and sampler.num_replicas == processes > 1 else None


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """The sampler of a loader that gives single indices, below whatever shards them; None when there is none."""
    batching = batching_of(dataloader)
    return dataloader.sampler if batching is None else innermost_sampler(batching)
