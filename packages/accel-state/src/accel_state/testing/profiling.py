"""Which functions a piece of work calls: what a test counts where a time would be noise."""

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
    """Call a function at each call and return within a block, and nowhere else.

    No garbage is collected meanwhile: a collection calls whatever other tests have registered for their objects.

    Args:
        note: as `sys.setprofile` takes it: frame, event and argument.
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
    """How many functions a call calls.

    Args:
        work: what is called; it counts itself.
        builtins: count functions of C too.

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
        # Before the block ends, which takes calls of its own.
        return calls
