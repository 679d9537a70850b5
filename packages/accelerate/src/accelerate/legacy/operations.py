"""Collectives with the argument names that callers of the older interface use, and what exists for that one alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

from accel_ops import collectives, objects, tree
from accel_ops import reduction as reductions
from accel_ops.checked_call import CheckedCall
from accel_state import current
from accel_state.errors import SettingError, ShapeMismatch, UnknownKind

__all__ = (
    "TENSOR_INT_TO_DTYPE",
    "TENSOR_TYPE_TO_INT",
    "DistributedOperationException",
    "broadcast",
    "broadcast_object_list",
    "chained_operation",
    "copy_tensor_to_devices",
    "gather_tensor_shape",
    "ignorant_find_batch_size",
    "is_torch_xpu_tensor",
    "reduce",
    "verify_operation",
)

F = TypeVar("F", bound=Callable[..., Any])

DistributedOperationException = ShapeMismatch
"""The error for calls that differ between processes."""

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


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """`accel_ops.broadcast`, whose `src` is `from_process` here."""
    return collectives.broadcast(tensor, from_process)


def broadcast_object_list(object_list: Any, from_process: int = 0) -> Any:
    """`accel_ops.broadcast_object_list`, whose `src` is `from_process` here."""
    return objects.broadcast_object_list(object_list, from_process)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """`accel_ops.reduce`, whose `op` is `reduction` here."""
    return reductions.reduce(tensor, reduction, scale)


def verify_operation(function: F) -> F:
    """Check first, in debug mode, that all processes call a collective with the same structure, shapes and dtypes.

    Collectives of this package need no decorator: they check always.

    Args:
        function: takes nested data first, or as `tensor`.

    Raises:
        ShapeMismatch: by the decorated function, on every process, when they differ.
    """
    name = tree.function_name(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        process = current.process_or_start()
        if process.debug and process.world_size > 1:
            data = kwargs["tensor"] if "tensor" in kwargs else args[0]
            with CheckedCall(process.transport, name) as call:
                plan, _ = call.plan(data, move=False)
                call.agree(plan)
        return function(*args, **kwargs)

    wrapped: Any = checked
    return wrapped  # type: ignore[no-any-return]


def chained_operation(function: F) -> F:
    """Name the decorated function in a mismatch that arises inside of it."""
    name = tree.function_name(function)

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ShapeMismatch as error:
            raise ShapeMismatch(f"{name}(): {error.failure}", error.obstacle, error.remedy) from error

    wrapped: Any = named
    return wrapped  # type: ignore[no-any-return]


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
    received: torch.Tensor = collectives.broadcast(placed, src=owner)
    return received


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Shape, as a tensor of integers, and number of the dtype of the tensor that one process has.

    Args:
        tensor: the tensor, or None on the processes that have none.

    Raises:
        SettingError: no process has one.
    """
    _, shape, dtype = _owner(tensor)
    return torch.tensor(shape, dtype=torch.int), TENSOR_TYPE_TO_INT[dtype]


def _owner(tensor: torch.Tensor | None) -> tuple[int, tuple[int, ...], torch.dtype]:
    mine: Any = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
    for rank, theirs in enumerate(objects.gather_object([mine])):
        if theirs is not None:
            return rank, *theirs
    raise SettingError(
        "Cannot copy the tensor of one process to all.", "Every process gave None.", "Give the tensor on one process."
    )
