"""Parts of a device mesh by the axes of a run: which processes read other data, which divide parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from accel_plugins.manifest import Axis

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ("DATA_AXES", "SEQUENCE_AXES", "flattened", "part", "present_axes", "sequence_part")

DATA_AXES: Final = (Axis.REPLICATE, Axis.SHARD)
"""Axes along which processes read different samples, outermost first."""

SEQUENCE_AXES: Final = (Axis.CONTEXT, Axis.SEQUENCE)
"""Axes along which processes read different parts of the same samples."""


def present_axes(mesh: DeviceMesh, axes: Iterable[Axis]) -> list[str]:
    """Names of those axes that the mesh has, in its order."""
    wanted = {axis.value for axis in axes}
    return [name for name in mesh.mesh_dim_names or () if name in wanted]


def part(mesh: DeviceMesh | None, axis: Axis) -> DeviceMesh | None:
    """The neighbours of this process along one axis, or None where it has none."""
    if mesh is None or axis.value not in (mesh.mesh_dim_names or ()):
        return None
    return mesh[axis.value]


def sequence_part(mesh: DeviceMesh | None) -> tuple[Axis, DeviceMesh] | None:
    """The axis along which the sequence is divided, with the neighbours along it; None where it is whole."""
    for axis in SEQUENCE_AXES:
        neighbours = part(mesh, axis)
        if neighbours is not None:
            return axis, neighbours
    return None


def flattened(mesh: DeviceMesh, axes: Iterable[Axis]) -> DeviceMesh | None:
    """A mesh of one dimension over those axes that the mesh has, or None when it has none of them."""
    names = present_axes(mesh, axes)
    if not names:
        return None
    return mesh[names[0]] if len(names) == 1 else mesh[tuple(names)]._flatten("_".join(names))
