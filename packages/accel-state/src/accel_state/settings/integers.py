"""Integers as scripts pass them: those of Python, and those of numpy and torch."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ("as_int",)


def as_int(value: Any) -> int | None:
    """An integer of any library as an int; None if a value is something else, such as a bool or a float.

    Example:
        >>> as_int(3), as_int(True), as_int(3.0)
        (3, None, None)
    """
    # operator.index takes bools, and tensors of bools.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool":
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        return None
