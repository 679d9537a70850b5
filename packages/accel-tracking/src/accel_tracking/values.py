"""Converts values as users log them (tensors on any device, numpy scalars, nested mappings) into what trackers store.

This module imports neither torch nor numpy: any object with `tolist` counts as a tensor.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import Any, TypeGuard

__all__ = ("as_number", "flatten_keys", "is_number", "plain", "scalars_as_numbers")

_PLAIN_TYPES = (str, int, float, bool, type(None))


def plain(value: Any) -> Any:
    """The value as JSON types: text, numbers, lists, and mappings with text keys; any other object as its text.

    Example:
        >>> plain({"path": os.path, 3: (1, True)})["3"]
        [1, True]
    """
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner) for inner in value]
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if callable(getattr(value, "tolist", None)):
        number = _number(value)
        return plain(value.tolist() if number is value else number)
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def scalars_as_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert each tensor or array of one element to a Python number, at any depth.

    Other values are unchanged: a tracker handles its own objects, such as images, and larger arrays.
    """
    return {name: _number(value) for name, value in values.items()}


def _number(value: Any) -> Any:
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, Mapping):
        return scalars_as_numbers(value)
    if not callable(getattr(value, "item", None)):
        return value
    count = value.numel() if callable(getattr(value, "numel", None)) else getattr(value, "size", None)
    return value.item() if count == 1 else value


def flatten_keys(values: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Flatten nested mappings into one mapping with joined keys.

    Example:
        >>> flatten_keys({"loss": 1, "eval": {"loss": 2, "accuracy": {"top1": 3}}})
        {'loss': 1, 'eval/loss': 2, 'eval/accuracy/top1': 3}
    """
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            result.update({f"{name}{separator}{inner}": leaf for inner, leaf in flatten_keys(value, separator).items()})
        else:
            result[str(name)] = value
    return result


def as_number(value: Any) -> int | float | None:
    """A metric as the number that a tracker draws: a bool is 0 or 1; None if the value is not a number.

    Example:
        >>> as_number(True), as_number(0.5), as_number("1")
        (1, 0.5, None)
    """
    if isinstance(value, int):
        return int(value)
    return value if isinstance(value, float) else None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is an int or a float; a bool is not a number here, unlike in `as_number`."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
