"""Hooks that run when a program creates a state or an Accelerator, or prepares objects.

A package that knows how programs of another library change classes looks there whether one did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

__all__ = ("on_creation", "run_creation_hooks")

_hooks: Final[list[Callable[[], None]]] = []


def on_creation(hook: Callable[[], None]) -> None:
    """Call `hook` at the start of each creation of a state or an Accelerator, and of each `prepare`."""
    _hooks.append(hook)


def run_creation_hooks() -> None:
    """Call the hooks in the order in which they were registered."""
    for hook in _hooks:
        hook()
