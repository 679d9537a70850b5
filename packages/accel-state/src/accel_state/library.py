"""Which modules belong to the library, and which line of the user's script called it.

Warnings, log records and reports of hangs name the line of the user.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import Final

__all__ = ("OWN_PACKAGES", "add_library", "caller", "is_library", "stack_level")

OWN_PACKAGES: Final = frozenset(
    {
        "accel_bigmodel",
        "accel_cli",
        "accel_data",
        "accel_check",
        "accel_megatron",
        "accel_ops",
        "accel_plugins",
        "accel_ray",
        "accel_state",
        "accel_testing",
        "accel_torch",
        "accel_torchft",
        "accel_tracking",
    }
)
"""The import names of this project; other packages, also the user's, may begin with "accel_" too."""

_libraries = {"accelerate", "contextlib", "functools", "logging", "threading", "torch", "typing_extensions"}
_libraries |= OWN_PACKAGES


def is_library(module: str) -> bool:
    """Whether a module is part of torch, of these packages or of a loaded plugin, and not the user's.

    Example:
        >>> is_library("accel_ops.collectives"), is_library("train")
        (True, False)
    """
    return module.partition(".")[0] in _libraries


def caller() -> tuple[CodeType, int]:
    """The code object of the innermost frame of the user's code, and its line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return frame.f_code, frame.f_lineno


def stack_level() -> int:
    """The `stacklevel` with which the caller's warning or log record names the innermost line of the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and is_library(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def add_library(package: str) -> None:
    """Count a top-level package as a library in `is_library`; loading a plugin does so for the plugin's package."""
    _libraries.add(package)
