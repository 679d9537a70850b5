"""The bar of a long load: drawn once it has taken a while, by the first process of each node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from accel_state.console import tqdm
from accel_state.settings.probe import importable

__all__ = ("PATIENCE", "progress")

PATIENCE: Final = 3.0
"""Seconds that a load may take before a bar is drawn."""


@contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function that is told of bytes as they are done, from any thread; it draws where tqdm is installed.

    Args:
        description: what stands before the bar.
        total: bytes of all.
    """
    if not importable("tqdm"):
        yield lambda count: None
        return
    lock = threading.Lock()
    with tqdm(desc=description, total=total, unit="B", unit_scale=True, mininterval=0.5, delay=PATIENCE) as bar:

        def advance(count: int) -> None:
            with lock:
                bar.update(count)

        yield advance
