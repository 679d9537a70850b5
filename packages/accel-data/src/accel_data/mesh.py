"""Which processes of a device mesh get the same data: those that differ in no data axis."""

from __future__ import annotations

import itertools
from typing import Any

__all__ = ("coordinates", "data_coordinates")

_DATA_AXES = ("dp", "fsdp")


def data_coordinates(mesh: Any) -> tuple[int, int]:
    """Number of different parts of the data on a mesh, and which of them is this process's.

    Axes are data axes when their name begins with "dp" or "fsdp"; processes along all other axes (tensor, context,
    sequence, pipeline) work on the same samples.

    Args:
        mesh: a `torch.distributed.device_mesh.DeviceMesh` with named dimensions.
    """
    count, index = 1, 0
    for number, name in enumerate(mesh.mesh_dim_names or ()):
        if name.startswith(_DATA_AXES):
            count *= mesh.size(number)
            index = index * mesh.size(number) + mesh.get_local_rank(number)
    return count, index


def coordinates(mesh: Any, world_size: int) -> list[int]:
    """By rank, which part of the data it gets; with no mesh every process gets a part of its own.

    Args:
        mesh: a `torch.distributed.device_mesh.DeviceMesh` with named dimensions over all processes, or None.
        world_size: number of processes.
    """
    if mesh is None:
        return list(range(world_size))
    indices = [0] * world_size
    for place in itertools.product(*(range(size) for size in mesh.mesh.shape)):
        index = 0
        for number, name in enumerate(mesh.mesh_dim_names or ()):
            if name.startswith(_DATA_AXES):
                index = index * mesh.size(number) + place[number]
        indices[int(mesh.mesh[place])] = index
    return indices
