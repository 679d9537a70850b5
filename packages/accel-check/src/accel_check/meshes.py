"""Follows the device meshes of a script, and along which of their axes ranks read the same samples."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch.distributed.device_mesh
import torch.distributed.tensor.parallel as parallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ("READ_ALIKE", "follow_meshes")

READ_ALIKE: Final = frozenset({"tp", "cp", "sp"})
"""Names of axes along which tensors or sequences are divided, and samples are not."""


def follow_meshes(
    created: Callable[[DeviceMesh], None],
    read_alike: Callable[[DeviceMesh], None],
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> None:
    """Follow meshes until this process ends.

    Args:
        created: called with each mesh that `init_device_mesh` made.
        read_alike: called with each mesh whose ranks read the same samples.
        around: returns a function to call instead of `init_device_mesh`.
    """
    original, divide = torch.distributed.device_mesh.init_device_mesh, parallel.parallelize_module
    create = around(original)

    @functools.wraps(original)
    def followed(*arguments: Any, **options: Any) -> Any:
        mesh = create(*arguments, **options)
        created(mesh)
        for name in READ_ALIKE & set(mesh.mesh_dim_names or ()):
            read_alike(mesh[name])
        return mesh

    @functools.wraps(divide)
    def divided(module: Any, device_mesh: Any = None, *arguments: Any, **options: Any) -> Any:
        if device_mesh is not None:
            read_alike(device_mesh)
        return divide(module, device_mesh, *arguments, **options)

    parallel.parallelize_module = divided
    for name, module in list(sys.modules.items()):
        if name.startswith(("torch.distributed", "accel_")) and getattr(module, "init_device_mesh", None) is original:
            module.init_device_mesh = followed  # type: ignore[attr-defined]
