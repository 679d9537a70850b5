"""Memory of training, before the launch: one step of a plan under fake tensors and a fake process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ("estimating", "is_estimating")

_estimates = False


def is_estimating() -> bool:
    """Whether the code runs in an estimate, where tensors have shapes and no values.

    Example:
        >>> rows = capacity if is_estimating() else int(mask.sum())  # doctest: +SKIP
    """
    return _estimates


@contextmanager
def estimating() -> Iterator[None]:
    """A context in which `is_estimating()` is true, and modules without values are copied without a warning."""
    global _estimates
    before, _estimates = _estimates, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        _estimates = before
