"""Which processes of a device mesh get the same data: those that differ in no data axis."""

from __future__ import annotations

from typing import Any

__all__ = ("data_coordinates",)

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
