"""Streams that can be divided at their source, so that no process reads what is not its own."""

from __future__ import annotations

from typing import Any

from accel_data.config import Sharding

__all__ = ("divided_already", "own_part")


def own_part(dataset: Any, processes: int, index: int, sharding: Sharding) -> Any | None:
    """The stream of one process; None when the stream has to be divided some other way.

    Args:
        dataset: the whole stream, or one that is divided already.
        processes: how many share it.
        index: which of them is asked for.
        sharding: see `DataLoaderConfiguration`.
    """
    if callable(sharding):
        return sharding(dataset, processes, index)
    if sharding == "already" or (sharding == "auto" and divided_already(dataset)):
        return dataset
    if sharding != "auto" or processes == 1:
        return None
    if callable(getattr(dataset, "split_by_node", None)):
        return dataset.split_by_node(index, processes)
    # Fewer shards, or a number that does not divide evenly, would leave some process with nothing or with more.
    count = getattr(dataset, "num_shards", None)
    if callable(getattr(dataset, "shard", None)) and isinstance(count, int) and count and count % processes == 0:
        return dataset.shard(num_shards=processes, index=index)
    return None


def divided_already(dataset: Any) -> bool:
    """Whether a stream says of itself that it is one process's part, as those of Hugging Face datasets do."""
    return getattr(dataset, "_distributed", None) is not None
