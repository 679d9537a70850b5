"""Decorators for collectives that others write."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from accel_ops.exchange import CheckedCall
from accel_ops.tree import name_of
from accel_state import current
from accel_state.errors import ShapeMismatch

__all__ = ("DistributedOperationException", "chained_operation", "verify_operation")

F = TypeVar("F", bound=Callable[..., Any])

DistributedOperationException = ShapeMismatch
"""The name by which callers of the older interface catch a mismatch."""


def verify_operation(function: F) -> F:
    """Check first, in debug mode, that all processes call a collective with the same structure, shapes and dtypes.

    Collectives of this package need no decorator: they check always.

    Args:
        function: takes nested data first, or as `tensor`.

    Raises:
        ShapeMismatch: by the decorated function, on every process, when they differ.
    """
    name = name_of(function)

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
    name = name_of(function)

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ShapeMismatch as error:
            raise ShapeMismatch(f"{name}(): {error.asked}", error.obstacle, error.remedy) from error

    wrapped: Any = named
    return wrapped  # type: ignore[no-any-return]
