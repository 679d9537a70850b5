"""Collectives with the argument names of the older interface, and functions that only that interface has."""

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
"""Raised when the calls of a collective differ between processes."""

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
"""Numbers that stand for dtypes when they are sent between processes."""

TENSOR_INT_TO_DTYPE: Final = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """`accel_ops.broadcast`, with its argument `src` named `from_process`."""
    return collectives.broadcast(tensor, from_process)


def broadcast_object_list(object_list: Any, from_process: int = 0) -> Any:
    """`accel_ops.broadcast_object_list`, with its argument `src` named `from_process`."""
    return objects.broadcast_object_list(object_list, from_process)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """`accel_ops.reduce`, with its argument `op` named `reduction`."""
    return reductions.reduce(tensor, reduction, scale)


def verify_operation(function: F) -> F:
    """Decorator: in debug mode, check first that structure, shapes and dtypes are the same on all processes.

    Collectives of this project need no decorator, because they always check.

    Args:
        function: a function with nested data as first argument, or as the keyword argument `tensor`.

    Raises:
        ShapeMismatch: raised by the decorated function on every process when they differ.
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
    """Decorator: add the function's name to a `ShapeMismatch` raised inside it."""
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


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Shape (a tensor of integers) and dtype number of the tensor that one process has.

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
