"""Signals that reach the launcher, handed over one after the other in its loop instead of interrupting it."""

from __future__ import annotations

import select
import signal
import socket
from types import TracebackType
from typing import Any, Final

__all__ = ("ENDING", "FORWARDED", "Inbox")


def _existing(*names: str) -> tuple[int, ...]:
    return tuple(int(getattr(signal, name)) for name in names if hasattr(signal, name))


ENDING: Final = _existing("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
"""Signals that ask the run to end."""

FORWARDED: Final = (*ENDING, *_existing("SIGUSR1", "SIGUSR2"))
"""Signals that the launcher passes on to the processes."""

_CHILD_ENDED: Final = _existing("SIGCHLD")

# Where no signal tells that a process ended, the launcher has to look.
_LONGEST_WAIT: Final = float("inf") if _CHILD_ENDED else 0.1


class Inbox:
    """Collects signals while it is entered; a signal that was ignored (`nohup`) stays ignored."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[int, Any] = {}
        self._wakeup = -1

    def __enter__(self) -> Inbox:
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*FORWARDED, *_CHILD_ENDED):
            if number in _CHILD_ENDED or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, _already_in_the_inbox)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup)
        self._reader.close()
        self._writer.close()

    def wait(self, timeout: float) -> list[int]:
        """Signals to forward that came since the last call; returns early when one comes or a process ends."""
        if not select.select([self._reader], [], [], min(timeout, _LONGEST_WAIT))[0]:
            return []
        try:
            numbers = self._reader.recv(4096)
        except BlockingIOError:
            return []
        return [number for number in numbers if number in FORWARDED]


def _already_in_the_inbox(number: int, frame: object) -> None:
    """Do nothing: the interpreter writes the number into the inbox of a signal that has a handler."""
