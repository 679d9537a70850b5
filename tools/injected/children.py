"""Functions in forked children, whose answers come back; and children in containers of their own."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from accel_state.errors import NotOffered

__all__ = ("Answer", "Child", "ask", "contained", "require_containers", "with_pid")

_FORK: Final = multiprocessing.get_context("fork")
_NAMESPACES: Final = 0x20000000 | 0x04000000 | 0x00020000
"""New PIDs, a new host name, new mounts."""
_PRIVATE_BELOW: Final = (1 << 18) | (1 << 14)


@dataclass(frozen=True)
class Answer:
    """How a function in a child ended.

    Args:
        value: what it returned.
        error: what it raised, or how the child ended; None after a return.
    """

    value: Any = None
    error: str | None = None

    def get(self) -> Any:
        """The value.

        Raises:
            RuntimeError: there is none.
        """
        if self.error is not None:
            raise RuntimeError(self.error)
        return self.value


class Child:
    """A forked child that calls a function.

    Args:
        function: called in the child.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._answers, answers = _FORK.Pipe(duplex=False)
        self.process = _FORK.Process(target=_call, args=(function, answers))
        self.process.start()
        answers.close()

    def answer(self, seconds: float = 300.0) -> Answer:
        """What the function returned or raised, once the child has ended; it is killed after some seconds."""
        until = time.monotonic() + seconds
        answer = Answer(error="it ended without an answer")
        if self._answers.poll(seconds):
            try:
                answer = self._answers.recv()
            except EOFError:
                self.process.join(1)
                answer = Answer(error=f"it ended with exit code {self.process.exitcode}")
        self.process.join(max(0.0, until - time.monotonic()))
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            return Answer(error="it hung")
        return answer


def _call(function: Callable[[], Any], answers: Connection) -> None:
    try:
        answers.send(Answer(function()))
    except BaseException:  # also of `sys.exit`: the parent asks for an answer
        answers.send(Answer(error=traceback.format_exc()))


def ask(*functions: Callable[[], Any], seconds: float = 300.0) -> list[Answer]:
    """Call functions at the same time, each in a child forked for it, and return their answers."""
    children = [Child(function) for function in functions]
    return [child.answer(seconds) for child in children]


# ---------------------------------------------------------------- containers


def contained(function: Callable[[], Any]) -> Any:
    """Call a function as the first process of a container; call this in a child, which cannot start threads after it.

    Raises:
        RuntimeError: the function raised, or this process may not make a container.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_NAMESPACES))
    (answer,) = ask(partial(_as_first, libc, function))
    return answer.get()


def _as_first(libc: ctypes.CDLL, function: Callable[[], Any]) -> Any:
    _check(libc.mount(None, b"/", None, ctypes.c_ulong(_PRIVATE_BELOW), None))
    _check(libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(0), None))
    socket.sethostname("one-name")
    return function()


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise PermissionError(number, os.strerror(number))


def require_containers() -> None:
    """Check that this process may make containers.

    Raises:
        NotOffered: it may not.
    """
    (answer,) = ask(partial(contained, os.getpid))
    if answer.error is not None:
        why = answer.error.strip().splitlines()[-1]
        raise NotOffered("Containers were to save.", f"This process may not make namespaces: {why}", "Run it as root.")


def with_pid(pid: int, function: Callable[[], Any]) -> Any:
    """Let the next process of this container have a pid, and call a function that starts it."""
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    return function()
