"""Whether a signal that the launcher received was sent to its whole process group, or to the launcher alone.

A single process of a run keeps the terminal, so it shares the launcher's process group. Ctrl-C in the terminal and
`kill` of the group reach both, `kill` of the launcher's number reaches only the launcher. The launcher has to forward
the signal in the second case only, and no system call tells the two apart.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Collection
from types import TracebackType
from typing import Final

from accel_cli.launch.signals import is_in_foreground

__all__ = ("GroupWitness",)

_WAITS_FOR_ITS_INPUT: Final = ("cat",)

_PENDING: Final = "ShdPnd:"


class GroupWitness:
    """A context manager with a process in the launcher's group that blocks some signals, so that they stay pending.

    The system sends a signal to the newest process of a group first, and so to the witness before the launcher.

    Args:
        numbers: the signals.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        self._numbers = numbers
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> GroupWitness:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def saw(self, number: int) -> bool:
        """Whether a signal that has just arrived at this process was sent to the whole group."""
        if self._process is None:
            return number == signal.SIGINT and is_in_foreground()
        seen = _is_pending(self._process.pid, number)
        if seen:
            # A pending signal cannot be taken back.
            self._end()
            self._start()
        return seen

    def _start(self) -> None:
        if not sys.platform.startswith("linux"):
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        try:
            # The process ends with this one, because its input does.
            self._process = subprocess.Popen(
                _WAITS_FOR_ITS_INPUT, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        except OSError:
            self._process = None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _is_pending(pid: int, number: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            line = next((line for line in file if line.startswith(_PENDING)), f"{_PENDING} 0")
    except OSError:
        return False
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
