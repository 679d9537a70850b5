"""Estimates the memory of training before the launch: steps of a plan with fake tensors and a fake process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ("estimating", "is_estimating")

_estimates = False


def is_estimating() -> bool:
    """Whether the code runs in an estimate, in which tensors have shapes but no values.

    Example:
        >>> rows = capacity if is_estimating() else int(mask.sum())  # doctest: +SKIP
    """
    return _estimates


@contextmanager
def estimating() -> Iterator[None]:
    """A context in which `is_estimating()` is true; modules without values are made and copied without a warning."""
    global _estimates
    before, _estimates = _estimates, True
    try:
        with warnings.catch_warnings(), _without_truncation():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        _estimates = before


@contextmanager
def _without_truncation() -> Iterator[None]:
    """Make truncated normal initialisation skip fake tensors, because torch reads the values that it draws."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.nn import init

    draw: Any = init._no_grad_trunc_normal_

    def drawn(tensor: Any, *arguments: Any, **options: Any) -> Any:
        return tensor if isinstance(tensor, FakeTensor) else draw(tensor, *arguments, **options)

    init._no_grad_trunc_normal_ = drawn
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = draw
