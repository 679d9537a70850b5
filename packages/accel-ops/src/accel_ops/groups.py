"""The `group` argument of collectives: a torch process group, or an axis of a device mesh.

    gather(loss, group="dp_shard")          # an axis of the mesh of the run, by its name
    gather(loss, group=mesh["tp"])          # a one-dimensional DeviceMesh
    gather(loss, group=process_group)       # from torch.distributed.new_group

Ranks in arguments, results and errors are those of the run, as in torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, Union

from accel_state import current
from accel_state.errors import SettingError
from accel_state.watch.calls import format_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from accel_state.identity import Process

__all__ = ("Group", "Members", "members_of")

Group: TypeAlias = Union["ProcessGroup", "DeviceMesh", str, None]

_MAX_NAMED_RANKS: Final = 16


class Members(NamedTuple):
    """The processes of a group.

    Args:
        ranks: their ranks in the run, in the order of the group.
        label: name of the group in messages.
        process_group: the torch process group; None if this is the only process.
    """

    ranks: tuple[int, ...]
    label: str
    process_group: Any


def members_of(group: Group, operation: str, process: Process) -> Members:
    """The processes of a group that contains this process.

    Args:
        group: a group as the module describes it.
        operation: name of the function that the user called.
        process: the `Process` of this rank.

    Raises:
        SettingError: there is no such group, or this process is not in it.
    """
    if group is None:
        ranks = tuple(range(process.world_size))
        return Members(ranks, "", None)
    if isinstance(group, str):
        return _along_axis(group, operation, process)
    mesh_module = sys.modules.get("torch.distributed.device_mesh")
    if mesh_module is not None and isinstance(group, mesh_module.DeviceMesh):
        if group.ndim != 1:
            raise SettingError(
                f"Cannot run {operation}() in a DeviceMesh of {group.ndim} dimensions.",
                "A collective needs a mesh of one dimension.",
                f"Pass one axis of it, such as group=mesh[{(group.mesh_dim_names or ('name',))[0]!r}].",
            )
        names = group.mesh_dim_names
        return _of_process_group(group.get_group(), names[0] if names else "", operation, process)
    return _of_process_group(group, "", operation, process)


def _along_axis(axis: str, operation: str, process: Process) -> Members:
    # Imported only if there is a mesh.
    from accel_state.mesh import AXES, FLATTENED

    run = current.run_or_none()
    mesh = None if run is None else run.mesh
    names = () if mesh is None else mesh.mesh_dim_names
    if mesh is not None and axis in names:
        return _of_process_group(mesh.get_group(axis), axis, operation, process)
    named_axis = axis in AXES or axis in FLATTENED
    if run is not None and named_axis:
        config = run.parallelism_config
        flattened = None if config is None or mesh is None else config.submesh(axis)
        if flattened is not None:
            return _of_process_group(flattened.get_group(), axis, operation, process)
        return Members((process.rank,), f"the group {axis!r} of rank {process.rank}", None)
    raise SettingError(
        f"Cannot run {operation}() in the group {axis!r}.",
        f"The mesh of this run has the axes {', '.join(map(repr, names))}."
        if names
        else "This run has no device mesh.",
        "Pass one of its axes, a one-dimensional DeviceMesh, or a process group.",
    )


def _of_process_group(group: Any, name: str, operation: str, process: Process) -> Members:
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and isinstance(group, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(group))
    elif dist is not None and group == dist.GroupMember.NON_GROUP_MEMBER:
        ranks = ()
    else:
        raise SettingError(
            f"Cannot run {operation}() in group={group!r}.",
            f"It is of type {type(group).__name__}.",
            "Pass a process group, a one-dimensional DeviceMesh, or the name of an axis of the mesh.",
        )
    label = _label(name, ranks)
    if process.rank not in ranks:
        raise SettingError(
            f"Cannot run {operation}() in {label}.",
            f"This process, rank {process.rank}, is not in it.",
            "Call it only on the ranks of the group, or pass a group that contains this rank.",
        )
    return Members(ranks, label, group if len(ranks) > 1 else None)


def _label(name: str, ranks: tuple[int, ...]) -> str:
    if not ranks:
        return "a group of other ranks"
    text = format_ranks(list(ranks)) if len(ranks) <= _MAX_NAMED_RANKS else f"{len(ranks)} ranks from {min(ranks)}"
    return f"the group {name!r} of {text}" if name else f"the group of {text}"
