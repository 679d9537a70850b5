"""Counts the functions that a piece of code calls, for tests in which a measured time would be too noisy."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ("count_calls", "profile")


@contextmanager
def profile(note: Callable[[FrameType, str, Any], object]) -> Iterator[None]:
    """Call `note` at each function call and return inside the block, and nowhere else.

    Garbage collection is disabled meanwhile, because it calls finalizers of objects of other tests.

    Args:
        note: a function for `sys.setprofile`, called with frame, event and argument.
    """
    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()


def count_calls(work: Callable[[], object], builtins: bool = True) -> int:
    """Count the functions that a call of `work` calls.

    Args:
        work: the function; it is counted too.
        builtins: count C functions too.

    Example:
        >>> count_calls(lambda: len("four"), builtins=False)
        1
    """
    kinds = ("call", "c_call") if builtins else ("call",)
    calls = 0

    def note(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event in kinds

    with profile(note):
        work()
        # Before the end of the block, which also calls functions.
        return calls
