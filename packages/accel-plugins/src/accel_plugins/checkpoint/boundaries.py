"""Boundaries between training steps, on one of which all processes agree without waiting for one that trains.

Each process counts the boundaries that it passes. When a copy turns out to be torn, a thread in each process stops the
count and tells it to the others; all meet at the boundary after the highest count.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_ops.agreement import StoreBarrier

__all__ = ("StepBoundaries",)


class StepBoundaries:
    """The boundaries since a checkpoint was begun; all processes pass the same ones in the same order.

    Attributes:
        steps: steps of optimizers since then.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._passed = 0
        self._chosen: int | None = None
        self._frozen = False
        self._lock = threading.Lock()
        self._decided = threading.Event()

    def reached(self) -> bool:
        """Pass a boundary; from the thread that trains.

        Returns:
            Whether the processes agreed to meet here.
        """
        with self._lock:
            self._passed += 1
            if not self._frozen:
                return False
        self._decided.wait()
        return self._chosen is not None and self._passed >= self._chosen

    def agree(self, barrier: StoreBarrier) -> None:
        """Choose a boundary that no process has passed; from a thread of each process.

        Raises:
            CheckpointError: a process failed, or did not answer before the deadline.
        """
        with self._lock:
            self._frozen = True
            passed = self._passed
        try:
            highest = barrier.wait("boundary", str(passed), lambda counts: max(counts, key=int), last=True)
            self._chosen = int(highest) + 1
        finally:
            self._decided.set()
