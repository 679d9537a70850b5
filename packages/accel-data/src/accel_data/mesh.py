"""Shards of the data on a device mesh: processes with equal coordinates on all data axes read the same data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

from accel_state.errors import SettingError

__all__ = ("coordinates", "data_coordinates", "first_of_each")

_DATA_AXES: Final = ("dp", "fsdp")


def data_coordinates(mesh: Any) -> tuple[int, int]:
    """The number of different shards of the data on a mesh, and the index of this process's shard.

    Axes are data axes if their name begins with "dp" or "fsdp"; processes along all other axes (tensor, context,
    sequence, pipeline) read the same samples.

    Args:
        mesh: a `torch.distributed.device_mesh.DeviceMesh` with named dimensions.

    Raises:
        SettingError: its dimensions have no names.
    """
    count = math.prod(mesh.size(axis) for axis in _data_axes(mesh))
    return count, _shard_at(mesh, [mesh.get_local_rank(axis) for axis in range(mesh.ndim)])


def coordinates(mesh: Any, world_size: int) -> list[int]:
    """The index of each rank's shard of the data; without a mesh every process has its own shard.

    Args:
        mesh: a `torch.distributed.device_mesh.DeviceMesh` with named dimensions over all processes, or None.
        world_size: number of processes.
    """
    if mesh is None:
        return list(range(world_size))
    shards = [0] * world_size
    for place in itertools.product(*(range(size) for size in mesh.mesh.shape)):
        shards[int(mesh.mesh[place])] = _shard_at(mesh, place)
    return shards


def first_of_each(mesh: Any, world_size: int) -> list[int]:
    """By shard of the data, the first process that reads it; arguments like those of `coordinates`."""
    shards = coordinates(mesh, world_size)
    return [shards.index(shard) for shard in range(max(shards) + 1)]


def _data_axes(mesh: Any) -> list[int]:
    if mesh.mesh_dim_names is None:
        raise SettingError(
            "Cannot shard a loader between the processes of this device mesh.",
            "Its dimensions have no names, which would determine the processes that read the same data.",
            "Create the mesh with mesh_dim_names, in which the names of data axes begin with dp or fsdp.",
        )
    return [axis for axis, name in enumerate(mesh.mesh_dim_names) if name.startswith(_DATA_AXES)]


def _shard_at(mesh: Any, place: Sequence[int]) -> int:
    shard = 0
    for axis in _data_axes(mesh):
        shard = shard * int(mesh.size(axis)) + place[axis]
    return shard
