"""Bringing a tensor that one process alone has to all processes."""

from __future__ import annotations

from typing import Any, Final

import torch

from accel_ops.collectives import broadcast
from accel_ops.objects import gather_object
from accel_state import current
from accel_state.errors import SettingError

__all__ = ("TENSOR_INT_TO_DTYPE", "TENSOR_TYPE_TO_INT", "copy_tensor_to_devices", "gather_tensor_shape")

TENSOR_TYPE_TO_INT: Final = {
    torch.float: 1,
    torch.double: 2,
    torch.half: 3,
    torch.bfloat16: 4,
    torch.uint8: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.bool: 10,
}
"""Numbers by which dtypes are known in messages."""

TENSOR_INT_TO_DTYPE: Final = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor of the first process that has one, on every process and its device.

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
    received: torch.Tensor = broadcast(placed, from_process=owner)
    return received


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Shape, as a tensor of whole numbers, and number of the dtype of the tensor that one process has.

    Args:
        tensor: the tensor, or None on the processes that have none.

    Raises:
        SettingError: no process has one.
    """
    _, shape, dtype = _owner(tensor)
    return torch.tensor(shape, dtype=torch.int), TENSOR_TYPE_TO_INT[dtype]


def _owner(tensor: torch.Tensor | None) -> tuple[int, tuple[int, ...], torch.dtype]:
    mine: Any = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    for rank, theirs in enumerate(gather_object([mine])):
        if theirs is not None:
            return rank, *theirs
    raise SettingError(
        "The tensor of one process was to be copied to all.", "No process gave one.", "Give it on one process."
    )
