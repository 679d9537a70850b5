"""Running a function in a forked child that is stopped at each of its file operations, and hit by a fault at one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from accel_plugins.testing.faults import syscalls
from accel_plugins.testing.faults.operations import Operation, operation_of
from accel_plugins.testing.faults.syscalls import obstacle
from accel_state.errors import NotOffered

__all__ = ("Ended", "Fault", "obstacle", "run")

_ALL_KINDS: Final = 0x40000000
_AT_CALL: Final = signal.SIGTRAP | 0x80


class Fault(NamedTuple):
    """What happens, and at which operation (counted from 0).

    Args:
        at: before which operation.
        error: number of an error that the operation gives in place of happening; None kills the process.
        only: kinds of operations that are counted; all when empty.
        lasting: whether all operations that are counted fail from then on, as on a full disk.
    """

    at: int
    error: int | None = None
    only: tuple[str, ...] = ()
    lasting: bool = False


@dataclass
class Ended:
    """How a traced child ended.

    Attributes:
        operations: what it did below the folder, in order; the one that was hit is not among them.
        code: its exit code, negative for a signal.
        companion_code: the same of the companion; None when there was none, or it was killed.
        hung: whether one of them was killed because time was up.
        hit: the operation at which the fault struck, or None.
    """

    operations: list[Operation] = field(default_factory=list)
    code: int = 0
    companion_code: int | None = None
    hung: bool = False
    hit: Operation | None = None


def run(
    function: Callable[[], Any],
    below: Path,
    fault: Fault | None = None,
    *,
    companion: Callable[[], Any] | None = None,
    timeout: float = 60.0,
    log: Path | None = None,
) -> Ended:
    """Call a function in a child that is forked from this process, and record its operations below a folder.

    Args:
        function: what the child does; what it raises gives exit code 1.
        below: operations elsewhere are neither recorded nor counted.
        fault: what happens to it.
        companion: what a second child does meanwhile, without being traced: another process of the same run.
        timeout: seconds after which they are killed.
        log: file that takes what the child prints; this process's output by default.

    Raises:
        NotOffered: this machine cannot trace.
    """
    reason = obstacle(errors=fault is not None and fault.error is not None)
    if reason is not None:
        raise NotOffered("Cannot trace file operations.", reason, "Run this test on another machine.")
    until = time.monotonic() + timeout
    other = None if companion is None else _fork(companion, log, traced=False)
    ended = _Tracer(_fork(function, log), below.resolve(), fault).watch(timeout)
    if other is not None:
        ended.companion_code = _wait(other, until)
        ended.hung = ended.hung or ended.companion_code is None
    return ended


def _wait(pid: int, until: float) -> int | None:
    """The exit code of a child; None when it had to be killed."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.01)


def _fork(function: Callable[[], Any], log: Path | None, *, traced: bool = True) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        if log is not None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        if traced:
            syscalls.trace_me()
            os.kill(os.getpid(), signal.SIGSTOP)
        function()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # a child must not go on in the code of its parent
        traceback.print_exc()
    finally:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon and code == 0:
                thread.join()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _Tracer:
    """Follows the threads of one child."""

    def __init__(self, pid: int, below: Path, fault: Fault | None) -> None:
        self._pid, self._below, self._fault = pid, below, fault
        self._ended = Ended()
        self._counted = 0
        self._doing: dict[int, Operation] = {}
        self._failing: set[int] = set()

    def watch(self, timeout: float) -> Ended:
        timer = threading.Timer(timeout, self._time_is_up)
        timer.start()
        try:
            _, status = os.waitpid(self._pid, 0)
            if os.WIFSIGNALED(status):
                # Time was up before it came to its first stop.
                self._ended.code = os.waitstatus_to_exitcode(status)
                return self._ended
            syscalls.follow(self._pid)
            self._go_on(self._pid)
            while self._one_event():
                pass
        finally:
            timer.cancel()
        return self._ended

    def _time_is_up(self) -> None:
        self._ended.hung = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def _one_event(self) -> bool:
        """Handle one event of one thread; False when the child has ended."""
        try:
            thread, status = os.waitpid(-self._pid, _ALL_KINDS)
        except ChildProcessError:
            return False
        if not os.WIFSTOPPED(status):
            if thread == self._pid:
                self._ended.code = os.waitstatus_to_exitcode(status)
            return thread != self._pid
        number = os.WSTOPSIG(status)
        if number == _AT_CALL:
            self._at_call(thread)
            self._go_on(thread)
        else:
            # A new thread begins with a stop of its own; whatever else is meant for the child.
            own = number in (signal.SIGTRAP, signal.SIGSTOP)
            self._go_on(thread, 0 if own else number)
        return True

    def _go_on(self, thread: int, number: int = 0) -> None:
        with contextlib.suppress(ProcessLookupError):
            syscalls.next_call(thread, number)

    def _at_call(self, thread: int) -> None:
        try:
            stop = syscalls.read_stop(thread)
            if stop.entering:
                self._entering(thread, stop)
            else:
                self._leaving(thread, stop)
        except (ProcessLookupError, FileNotFoundError):
            # It was killed meanwhile.
            return

    def _entering(self, thread: int, stop: syscalls.Stop) -> None:
        name = syscalls.CALLS.get(stop.number)
        if name is None:
            return
        try:
            operation = operation_of(name, thread, stop.arguments)
        except NotOffered:
            self._kill()
            raise
        except OSError:
            # The call itself will meet the same: a descriptor that is not open, for example.
            return
        if operation is None or not self._concerns(operation):
            return
        if self._strikes(operation):
            self._ended.hit = self._ended.hit or operation
            if self._fault is None or self._fault.error is None:
                self._kill()
            else:
                syscalls.fail_call(thread, None)
                self._failing.add(thread)
            return
        self._doing[thread] = operation

    def _concerns(self, operation: Operation) -> bool:
        return self._below in operation.path.parents or (
            operation.other is not None and self._below in operation.other.parents
        )

    def _strikes(self, operation: Operation) -> bool:
        fault = self._fault
        if fault is None or (fault.only and operation.kind not in fault.only):
            return False
        self._counted += 1
        return self._counted == fault.at + 1 or (fault.lasting and self._counted > fault.at)

    def _leaving(self, thread: int, stop: syscalls.Stop) -> None:
        if thread in self._failing:
            self._failing.discard(thread)
            assert self._fault is not None
            assert self._fault.error is not None
            syscalls.fail_call(thread, self._fault.error)
            return
        operation = self._doing.pop(thread, None)
        if operation is None or stop.result < 0:
            return
        if operation.kind == "write":
            operation = Operation("write", operation.path, None, operation.offset, operation.data[: stop.result])
        elif operation.kind == "copy":
            operation = Operation("copy", operation.path, data=operation.path.read_bytes())
        self._ended.operations.append(operation)
