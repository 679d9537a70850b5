"""A check of files that all processes come to the same end of, so that nobody waits for one that has failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accel_ops import gather_object
from accel_state.errors import AccelError

__all__ = ("agreed",)

T = TypeVar("T")


def agreed(look: Callable[[], T]) -> T:
    """Run a check on every process; what fails on one fails on all.

    Args:
        look: the check; what it raises is an `AccelError`.

    Returns:
        What it found on this process.

    Raises:
        AccelError: it failed here or elsewhere; its own failure where it has one.
    """
    found, failure = list[T](), None
    try:
        found.append(look())
    except AccelError as error:
        failure = error
    failures = [error for error in gather_object([failure]) if error is not None]
    if failures:
        raise failure or failures[0]
    return found[0]
