"""What nobody refers to any more when a process forks is never collected in the child.

A process group without a reference ends when the garbage is collected. In a forked child its threads are gone and the
locks that they held stay locked, so ending it there hangs or crashes the child. Hooks of other modules, such as those
of threading and logging, are the first to run in a child, so collecting pauses from before the fork until what came
from the parent is set apart.
"""

from __future__ import annotations

import gc
import os
from functools import cache

__all__ = ("keep_garbage_at_forks",)


class _Pause:
    """Collecting is off while forks are under way, which may be several in different threads."""

    def __init__(self) -> None:
        self._forks = 0
        self._collects = True

    def begin(self) -> None:
        if not self._forks:
            self._collects = gc.isenabled()
        self._forks += 1
        gc.disable()

    def end_in_parent(self) -> None:
        self._forks -= 1
        if self._collects and not self._forks:
            gc.enable()

    def end_in_child(self) -> None:
        gc.freeze()
        self._forks = 0
        if self._collects:
            gc.enable()


@cache
def keep_garbage_at_forks() -> None:
    """Leave what is garbage at a fork alone in the child, from now on."""
    if hasattr(os, "register_at_fork"):
        pause = _Pause()
        os.register_at_fork(before=pause.begin, after_in_parent=pause.end_in_parent, after_in_child=pause.end_in_child)
