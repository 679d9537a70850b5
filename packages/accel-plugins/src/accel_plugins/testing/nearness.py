"""Comparing what two runs came to, nested as it may be."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ("near",)


def near(expected: Any, rel: float = 2e-5, abs: float = 2e-6) -> Any:  # noqa: A002 - the words of pytest.approx
    """Something that equals every value that is near to `expected`: numbers, and lists and dictionaries of them.

    Example:
        >>> {"losses": [[1.0], [2.0]]} == near({"losses": [[1.000001], [2.0]]})
        True
    """
    if isinstance(expected, dict):
        return {name: near(value, rel, abs) for name, value in expected.items()}
    if isinstance(expected, list) and any(isinstance(value, (list, dict)) for value in expected):
        return [near(value, rel, abs) for value in expected]
    return pytest.approx(expected, rel=rel, abs=abs)
