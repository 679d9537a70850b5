"""Ports that no other test of this machine is given at the same time.

A port that was free a moment ago may be taken when it is listened on: the system deals such ports out again, to other
tests and to connections. These lie below those that systems deal out, and a locked file stands for each.
"""

from __future__ import annotations

import os
import random
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

try:
    import fcntl
except ImportError:
    # Windows: ports are chosen at random, without a lock.
    fcntl = None  # type: ignore[assignment]

__all__ = ("ReservedPort",)

_RANGE: Final = (20000, 31999)
_TRIES: Final = 1000

_random: Final = random.SystemRandom()


class ReservedPort:
    """One port at a time, of which no other `ReservedPort` of this machine has the same."""

    def __init__(self) -> None:
        self._lock: IO[str] | None = None

    def another(self) -> int:
        """A port on which nobody listens; the one before is given back.

        Raises:
            OSError: none was found.
        """
        self.give_back()
        for _ in range(_TRIES):
            port = _random.randint(*_RANGE)
            if self._take(port) and _can_be_listened_on(port):
                return port
            self.give_back()
        raise OSError(f"no free port between {_RANGE[0]} and {_RANGE[1]}")

    def give_back(self) -> None:
        """Let others have the port."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take(self, port: int) -> bool:
        if fcntl is None:
            return True
        folder = Path(tempfile.gettempdir()) / f"accel-ports-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        self._lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def _can_be_listened_on(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False
