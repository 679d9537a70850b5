"""Signals to the launcher: which it passes on, an inbox of them, and whether its whole group received one."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from types import TracebackType
from typing import Any, Final

__all__ = (
    "ENDING",
    "FORWARDED",
    "GroupWitness",
    "Inbox",
    "is_in_foreground",
)


def _existing(*names: str) -> tuple[int, ...]:
    return tuple(int(getattr(signal, name)) for name in names if hasattr(signal, name))


ENDING: Final = _existing("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals that ask the run to end."""

FORWARDED: Final = (*ENDING, *_existing("SIGUSR1", "SIGUSR2"))
"""Signals that the launcher passes on to the processes."""

_CHILD_SIGNALS: Final = _existing("SIGCHLD")

# Without a signal for the end of a process, the launcher polls.
_MAX_WAIT_S: Final = float("inf") if _CHILD_SIGNALS else 0.1


class Inbox:
    """A context manager that collects signals; a signal that was ignored before (`nohup`) stays ignored."""

    def __init__(self) -> None:
        self._reader: socket.socket
        self._writer: socket.socket | None = None
        self._posted_early: list[int] = []
        self._before: dict[int, Any] = {}
        self._wakeup = -1

    def __enter__(self) -> Inbox:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        for number in self._posted_early:
            self.post(number)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*FORWARDED, *_CHILD_SIGNALS):
            if number in _CHILD_SIGNALS or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, _already_in_the_inbox)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup)
        self._reader.close()
        if self._writer is not None:
            self._writer.close()

    def post(self, number: int) -> None:
        """Add a signal, from any thread, also before the context begins; without effect after it has ended."""
        if self._writer is None:
            self._posted_early.append(number)
            return
        try:
            self._writer.send(bytes([number]))
        except (OSError, ValueError):
            # The run has ended.
            return

    def wait(self, timeout: float) -> list[int]:
        """Signals to forward since the last call; returns early if a signal arrives or a process ends."""
        if not select.select([self._reader], [], [], min(timeout, _MAX_WAIT_S))[0]:
            return []
        try:
            numbers = self._reader.recv(4096)
        except BlockingIOError:
            return []
        return [number for number in numbers if number in FORWARDED]


def _already_in_the_inbox(number: int, frame: object) -> None:
    """Do nothing: for a signal with a handler, the interpreter itself writes the number into the inbox."""


def is_in_foreground() -> bool:
    """Whether the terminal sends its interrupts to the group of this process; its input may be another file."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


_WATCHER_ARGUMENTS: Final = ("cat",)

_PENDING_FIELD: Final = "ShdPnd:"


class GroupWitness:
    """A context manager with a process in the launcher's group that blocks some signals, so that they stay pending.

    A single process of a run keeps the terminal, so it shares the launcher's process group. Ctrl-C in the terminal and
    `kill` of the group reach both, `kill` of the launcher's number reaches only the launcher. The launcher has to
    forward the signal in the second case only, and no system call tells the two apart. The system sends a signal to
    the newest process of a group first, and so to the witness before the launcher.

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
                _WATCHER_ARGUMENTS, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
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
            line = next((line for line in file if line.startswith(_PENDING_FIELD)), f"{_PENDING_FIELD} 0")
    except OSError:
        return False
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
