"""Splitting a state dict into shards: which weights go into which file."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from accel_bigmodel.byte_counts import convert_file_size_to_int
from accel_bigmodel.tied import memory_of
from accel_bigmodel.weight_files.index import WeightIndex
from accel_bigmodel.weight_files.names import SAFE_WEIGHTS_NAME, is_safetensors, shard_name

__all__ = ("WeightShards", "split_state_dict", "stored_names")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightShards:
    """What will lie where.

    Args:
        files: file name to the names of its weights, in the order of the state dict.
        total_size: bytes of all weights, each tied group counted once.
    """

    files: Mapping[str, tuple[str, ...]]
    total_size: int

    @property
    def index(self) -> WeightIndex | None:
        """The index to write beside the shards, or None when a single file holds everything."""
        if len(self.files) == 1:
            return None
        return WeightIndex({name: file for file, names in self.files.items() for name in names}, self.total_size)


def split_state_dict(
    state_dict: Mapping[str, Any], max_shard_size: int | str = "10GB", name: str = SAFE_WEIGHTS_NAME
) -> WeightShards:
    """Split weights, in their order, into files of at most `max_shard_size`; a larger weight gets a file of its own.

    Tied weights lie in one file. A `.safetensors` name keeps only the first name of each tied group, because that
    format cannot hold two names for one tensor; other formats keep all.

    Args:
        max_shard_size: bytes, or text such as "5GB".
        name: what the file is called when there is only one; shards are numbered after it.

    Example:
        >>> import torch
        >>> split_state_dict({"a": torch.zeros(250), "b": torch.zeros(250)}, "1KB").files
        {'model-00001-of-00002.safetensors': ('a',), 'model-00002-of-00002.safetensors': ('b',)}
    """
    limit = convert_file_size_to_int(max_shard_size)
    shards: list[list[str]] = []
    room = total = 0
    for names, size in _groups(state_dict, first_only=is_safetensors(name)):
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1] += names
        room -= size
        total += size
    shards = shards or [[]]
    if len(shards) == 1:
        return WeightShards({name: tuple(shards[0])}, total)
    count = len(shards)
    return WeightShards({shard_name(name, i, count): tuple(names) for i, names in enumerate(shards, 1)}, total)


def stored_names(state_dict: Mapping[str, Any], name: str = SAFE_WEIGHTS_NAME) -> list[str]:
    """The names that a file of this name will hold: without the second names of tied weights for safetensors."""
    return [kept for names, _ in _groups(state_dict, first_only=is_safetensors(name)) for kept in names]


def _groups(state_dict: Mapping[str, Any], first_only: bool) -> Iterator[tuple[list[str], int]]:
    """Names that must lie together, and their bytes; in the order in which each first occurs."""
    groups: dict[Any, tuple[list[str], int]] = {}
    removed: dict[str, str] = {}
    for name, value in state_dict.items():
        is_tensor = isinstance(value, Tensor)
        key = memory_of(value) if is_tensor else name
        names, _ = groups.setdefault(key, ([], value.numel() * value.element_size() if is_tensor else 0))
        if names and first_only:
            removed[name] = names[0]
        else:
            names.append(name)
    if removed:
        _log.warning("Removed shared tensor names that the file holds under another name: %s.", removed)
    yield from groups.values()
