"""The progress bar of a long load, which the first process of each node draws after some seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from accel_state.console import tqdm
from accel_state.settings.installed import importable

__all__ = ("PATIENCE", "progress")

PATIENCE: Final = 2.0
"""Seconds that a load may take before a bar is drawn."""


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Return a function, callable from any thread, that adds finished bytes and draws the bar if tqdm is installed.

    Args:
        description: text before the bar.
        total: total number of bytes.
    """
    bar = _Bar(description, total)
    try:
        yield bar.advance
    finally:
        bar.close()


class _Bar:
    """A bar that is created, and its library imported, only after a long wait."""

    def __init__(self, description: str, total: int) -> None:
        self._description, self._total, self._done = description, total, 0
        self._from = time.monotonic() + PATIENCE
        self._lock = threading.Lock()
        self._bar: Any = None

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._bar is not None:
                self._bar.update(count)
            elif time.monotonic() >= self._from and importable("tqdm"):
                self._bar = tqdm(
                    desc=self._description,
                    total=self._total,
                    initial=self._done,
                    unit="B",
                    unit_scale=True,
                    mininterval=0.5,
                )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
