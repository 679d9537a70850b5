"""What a script that names its ranks meets in a world of one process: groups and meshes of size 1."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
import torch.distributed.device_mesh as meshes

__all__ = ("shrink_world",)


def shrink_world() -> None:
    """Make groups and meshes of any size contain this process alone, until it ends."""
    begin, group, make = dist.init_process_group, dist.new_group, meshes.init_device_mesh

    @functools.wraps(begin)
    def begin_alone(*arguments: Any, **options: Any) -> None:
        for name, value in (("rank", 0), ("world_size", 1)):
            if name in options:
                options[name] = value
        begin(*arguments, **options)

    @functools.wraps(group)
    def group_of_one(ranks: Any = None, *arguments: Any, **options: Any) -> Any:
        return group(None if ranks is None else [0], *arguments, **options)

    @functools.wraps(make)
    def mesh_of_one(device_type: str, mesh_shape: tuple[int, ...], **options: Any) -> Any:
        return make(device_type, (1,) * len(mesh_shape), **options)

    dist.init_process_group = dist.distributed_c10d.init_process_group = begin_alone
    dist.new_group = dist.distributed_c10d.new_group = group_of_one
    meshes.init_device_mesh = mesh_of_one
    dist.init_device_mesh = mesh_of_one  # type: ignore[attr-defined]
