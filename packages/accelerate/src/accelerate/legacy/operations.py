"""Collectives with the argument names of the older interface, and functions that only that interface has."""

from __future__ import annotations

from typing import Any

import torch

from accel_ops import collectives, objects, tree
from accel_ops import reduction as reductions
from accel_state import current
from accel_state.errors import SettingError, ShapeMismatch, UnknownKind

DistributedOperationException = ShapeMismatch
"""Raised when the calls of a collective differ between processes."""


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """`accel_ops.broadcast`, with its argument `src` named `from_process`."""
    return collectives.broadcast(tensor, from_process)


def broadcast_object_list(object_list: Any, from_process: int = 0) -> Any:
    """`accel_ops.broadcast_object_list`, with its argument `src` named `from_process`."""
    return objects.broadcast_object_list(object_list, from_process)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """`accel_ops.reduce`, with its argument `op` named `reduction`."""
    return reductions.reduce(tensor, reduction, scale)


def ignorant_find_batch_size(data: Any) -> int | None:
    """`accel_ops.find_batch_size`, or None for data without a batch size."""
    try:
        return tree.find_batch_size(data)
    except (SettingError, UnknownKind):
        return None


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Whether an object is a tensor on an Intel GPU."""
    return isinstance(tensor, torch.Tensor) and tensor.is_xpu


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Copy the tensor of the first process that has one to every process, on its device.

    Args:
        tensor: the tensor, or None on the processes that have none.

    Raises:
        SettingError: no process has one.
    """
    process = current.process_or_start()
    owner, shape, dtype = _owner(tensor)
    if tensor is None or owner != process.rank:
        tensor = torch.empty(shape, dtype=dtype)
    placed = tensor.detach().to(process.device, copy=owner != process.rank)
    received: torch.Tensor = collectives.broadcast(placed, src=owner)
    return received


def _owner(tensor: torch.Tensor | None) -> tuple[int, tuple[int, ...], torch.dtype]:
    mine: Any = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    for rank, theirs in enumerate(objects.gather_object([mine])):
        if theirs is not None:
            return rank, *theirs
    raise SettingError(
        "Cannot copy the tensor of one process to all.", "Every process gave None.", "Give the tensor on one process."
    )
