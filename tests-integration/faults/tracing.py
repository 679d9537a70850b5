"""Trace the file operations of a function in a forked child, and inject a fault at one of them.

The tracer uses Linux's `ptrace`. It records the child's system calls as file operations and makes one fail.
`refuse_exchange` makes the kernel refuse one kind of operation, without a tracer.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from accel_state.errors import NotOffered

__all__ = ("Ended", "Fault", "Operation", "obstacle", "refuse_exchange", "run")


# ----------------------------------------------------------------------------------- system calls of a traced process

_TRACEME, _CONT_TO_CALL, _GETREGS, _SETREGS = 0, 24, 12, 13
_SETOPTIONS, _GET_CALL = 0x4200, 0x420E
_OPTIONS: Final = 0x1 | 0x8 | 0x00100000
"""Mark stops at system calls; trace new threads; kill the traced process when the tracer dies."""

_X86_64: Final = {
    1: "write",
    2: "open",
    18: "pwrite64",
    20: "writev",
    40: "sendfile",
    74: "fsync",
    75: "fdatasync",
    9: "mmap",
    76: "truncate",
    77: "ftruncate",
    82: "rename",
    83: "mkdir",
    84: "rmdir",
    85: "creat",
    86: "link",
    87: "unlink",
    88: "symlink",
    257: "openat",
    258: "mkdirat",
    263: "unlinkat",
    264: "renameat",
    265: "linkat",
    266: "symlinkat",
    285: "fallocate",
    296: "pwritev",
    316: "renameat2",
    326: "copy_file_range",
}
_AARCH64: Final = {
    34: "mkdirat",
    35: "unlinkat",
    36: "symlinkat",
    37: "linkat",
    38: "renameat",
    45: "truncate",
    46: "ftruncate",
    47: "fallocate",
    56: "openat",
    64: "write",
    66: "writev",
    68: "pwrite64",
    70: "pwritev",
    71: "sendfile",
    82: "fsync",
    83: "fdatasync",
    222: "mmap",
    276: "renameat2",
    285: "copy_file_range",
}

CALLS: Final = {"x86_64": _X86_64, "aarch64": _AARCH64}.get(platform.machine(), {})
"""Names, by number, of the system calls that change files on this machine."""

_REGISTERS: Final = 27
_RAX, _ORIGINAL_RAX = 10, 15


class Stop(NamedTuple):
    """The system call at which a traced thread has stopped.

    Args:
        entering: True before the call, False after it.
        number: the number of the call; 0 after it.
        arguments: the arguments of the call; empty after it.
        result: the result of the call; 0 before it.
    """

    entering: bool
    number: int
    arguments: tuple[int, ...]
    result: int


def obstacle(errors: bool = False) -> str | None:
    """Why this machine cannot trace file operations (with `errors`: make them fail), or None."""
    if sys.platform != "linux" or not CALLS:
        return "Tracing needs ptrace of Linux on x86-64 or ARM64."
    if errors and platform.machine() != "x86_64":
        return "Making system calls fail is implemented for x86-64 only."
    return None


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    call.restype = ctypes.c_long
    result = int(call(request, pid, address, data))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace: {os.strerror(number)}")
    return result


def trace_me() -> None:
    """Allow the parent to trace this process; the caller then sends itself SIGSTOP."""
    _ptrace(_TRACEME, 0)


def follow(pid: int) -> None:
    """Set the tracing options of a process that has stopped for the first time."""
    _ptrace(_SETOPTIONS, pid, 0, _OPTIONS)


def next_call(thread: int, signal_number: int = 0) -> None:
    """Continue a stopped thread until it enters or leaves a system call."""
    _ptrace(_CONT_TO_CALL, thread, 0, signal_number)


def read_stop(thread: int) -> Stop:
    """The system call at which a thread has stopped."""
    memory = ctypes.create_string_buffer(88)
    _ptrace(_GET_CALL, thread, len(memory), ctypes.addressof(memory))
    raw = memory.raw
    if raw[0] == 1:
        number, *arguments = struct.unpack_from("<7Q", raw, 24)
        return Stop(True, number, tuple(arguments), 0)
    return Stop(False, 0, (), struct.unpack_from("<q", raw, 24)[0])


def fail_call(thread: int, number: int | None) -> None:
    """Skip a call (`number` None, before it), or set the error that it returns (`number`, after it)."""
    registers = (ctypes.c_ulong * _REGISTERS)()
    _ptrace(_GETREGS, thread, 0, ctypes.addressof(registers))
    if number is None:
        registers[_ORIGINAL_RAX] = ctypes.c_ulong(-1).value
    else:
        registers[_RAX] = ctypes.c_ulong(-number).value
    _ptrace(_SETREGS, thread, 0, ctypes.addressof(registers))


# ------------------------------------------------------------------------------------------------ operations on files

_AT_FDCWD: Final = 0xFFFFFF9C
_CREATES, _TRUNCATES = os.O_CREAT, os.O_TRUNC
_EXCHANGE: Final = 2
_AT_REMOVEDIR: Final = 0x200
_LONGEST_PATH: Final = 4096


@dataclass(frozen=True)
class Operation:
    """One file operation.

    Args:
        kind: "create", "write", "truncate", "fsync", "rename", "exchange", "mkdir", "rmdir", "unlink", "link",
            "symlink" or "copy".
        path: the file or folder that it changes.
        other: the second path of a rename or a link; the target text of a symlink.
        offset: the position of a write; the new length of a truncation.
        data: the written bytes.
    """

    kind: str
    path: Path
    other: Path | None = None
    offset: int = 0
    data: bytes = b""


class _Call:
    """A system call of a stopped thread, with access to the thread's memory."""

    def __init__(self, thread: int, arguments: tuple[int, ...]) -> None:
        self._thread = thread
        self.arguments = arguments

    def memory(self, address: int, size: int) -> bytes:
        with open(f"/proc/{self._thread}/mem", "rb", buffering=0) as file:
            file.seek(address)
            found = b""
            while len(found) < size and (more := file.read(size - len(found))):
                found += more
            return found

    def path(self, index: int, folder: int | None = None) -> Path:
        """The path in an argument, relative to the folder of the descriptor in another argument."""
        address = self.arguments[index]
        # The readable memory may end directly after the path.
        page = 4096 - address % 4096
        text = self.memory(address, page)
        if b"\0" not in text:
            text += self.memory(address + page, _LONGEST_PATH)
        named = os.fsdecode(text.partition(b"\0")[0])
        if folder is None or self.arguments[folder] & 0xFFFFFFFF == _AT_FDCWD:
            base = os.readlink(f"/proc/{self._thread}/cwd")
        else:
            base = str(self.opened(folder))
        return Path(os.path.normpath(os.path.join(base, named)))

    def text(self, index: int) -> Path:
        return Path(os.fsdecode(self.memory(self.arguments[index], 256).partition(b"\0")[0]))

    def opened(self, index: int) -> Path:
        """The path of the open descriptor in an argument."""
        return Path(os.readlink(f"/proc/{self._thread}/fd/{self.arguments[index] & 0xFFFFFFFF}"))

    def position(self, index: int) -> int:
        """The file position of the descriptor in an argument."""
        descriptor = self.arguments[index] & 0xFFFFFFFF
        with open(f"/proc/{self._thread}/fdinfo/{descriptor}") as file:
            facts = dict(line.split(":", 1) for line in file if ":" in line)
        if int(facts["flags"], 8) & os.O_APPEND:
            return os.stat(f"/proc/{self._thread}/fd/{descriptor}").st_size
        return int(facts["pos"])

    def pieces(self) -> bytes:
        """The data of the vector of a `writev`."""
        address, count = self.arguments[1], self.arguments[2]
        places = struct.iter_unpack("<QQ", self.memory(address, 16 * count))
        return b"".join(self.memory(base, size) for base, size in places)


def operation_of(name: str, thread: int, arguments: tuple[int, ...]) -> Operation | None:
    """The file operation of a call, before it runs; None when it changes no file.

    Raises:
        NotOffered: the call writes a file in a way that cannot be recorded.
    """
    call = _Call(thread, arguments)
    if name in ("write", "pwrite64", "writev", "pwritev"):
        data = call.pieces() if name.endswith("v") else call.memory(arguments[1], arguments[2])
        offset = arguments[3] if name.startswith("p") else call.position(0)
        return Operation("write", call.opened(0), offset=offset, data=data)
    if name in ("open", "creat", "openat"):
        return _opening(name, call)
    if name in ("fsync", "fdatasync"):
        return Operation("fsync", call.opened(0))
    if name in ("truncate", "ftruncate"):
        return Operation("truncate", call.path(0) if name == "truncate" else call.opened(0), offset=arguments[1])
    if name in ("sendfile", "copy_file_range"):
        return Operation("copy", call.opened(0 if name == "sendfile" else 2))
    if name == "mmap":
        _refuse_writing_through_memory(call)
        return None
    return _of_names(name, call)


def _opening(name: str, call: _Call) -> Operation | None:
    path = call.path(1, 0) if name == "openat" else call.path(0)
    flags = {"open": 1, "openat": 2}.get(name)
    asked = _CREATES | _TRUNCATES if flags is None else call.arguments[flags]
    if asked & _CREATES and not path.exists():
        return Operation("create", path)
    return Operation("truncate", path) if asked & _TRUNCATES and path.exists() else None


def _refuse_writing_through_memory(call: _Call) -> None:
    _, _, protection, flags, descriptor, _ = call.arguments
    writes_to_file = protection & 0x2 and flags & 0x1 and not flags & 0x20
    if writes_to_file and call.opened(4).is_file():
        raise NotOffered(
            "Cannot record file operations.",
            f"{call.opened(4)} (descriptor {descriptor}) is written through mapped memory.",
            "Use write() instead of mmap() in the function under test.",
        )


def _of_names(name: str, call: _Call) -> Operation | None:
    """Operations on folder entries."""
    if name in ("rename", "renameat", "renameat2"):
        paths = (call.path(0), call.path(1)) if name == "rename" else (call.path(1, 0), call.path(3, 2))
        exchanges = name == "renameat2" and call.arguments[4] & _EXCHANGE
        return Operation("exchange" if exchanges else "rename", *paths)
    if name in ("mkdir", "mkdirat"):
        return Operation("mkdir", call.path(0) if name == "mkdir" else call.path(1, 0))
    if name in ("rmdir", "unlink"):
        return Operation(name, call.path(0))
    if name == "unlinkat":
        return Operation("rmdir" if call.arguments[2] & _AT_REMOVEDIR else "unlink", call.path(1, 0))
    if name in ("link", "linkat"):
        return Operation(
            "link", *((call.path(0), call.path(1)) if name == "link" else (call.path(1, 0), call.path(3, 2)))
        )
    if name in ("symlink", "symlinkat"):
        return Operation("symlink", call.path(1) if name == "symlink" else call.path(2, 1), call.text(0))
    return None


# ------------------------------------------------------------------------------------------------------------ tracing

_ALL_KINDS: Final = 0x40000000
_AT_CALL: Final = signal.SIGTRAP | 0x80


class Fault(NamedTuple):
    """A fault, and the operation (counted from 0) at which it occurs.

    Args:
        at: the fault occurs before this operation.
        error: number of the error that the operation returns instead of running; None kills the process.
        only: the kinds of operations that are counted; empty means all.
        lasting: whether all later counted operations fail too, as on a full disk.
    """

    at: int
    error: int | None = None
    only: tuple[str, ...] = ()
    lasting: bool = False


@dataclass
class Ended:
    """How a traced child ended.

    Attributes:
        operations: its operations below the folder, in order, without the one at which the fault occurred.
        code: its exit code, negative for a signal.
        companion_code: the exit code of the companion; None when there was none, or it was killed.
        hung: whether a process was killed because of the timeout.
        hit: the operation at which the fault occurred, or None.
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
    timeout: float = 200.0,
    log: Path | None = None,
) -> Ended:
    """Call a function in a forked child, and record its file operations below a folder.

    Args:
        function: called in the child; if it raises, the exit code is 1.
        below: the folder; operations elsewhere are neither recorded nor counted.
        fault: the fault to inject, or None.
        companion: called at the same time in a second child, which is not traced: another process of the same run.
        timeout: seconds after which the children are killed.
        log: file for the child's output; by default this process's output.

    Raises:
        NotOffered: tracing is not possible on this machine.
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
            trace_me()
            os.kill(os.getpid(), signal.SIGSTOP)
        function()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # a child must not return into its parent's code
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
                # The timeout passed before its first stop.
                self._ended.code = os.waitstatus_to_exitcode(status)
                return self._ended
            follow(self._pid)
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
            # A new thread starts with a stop; other signals go to the child.
            own = number in (signal.SIGTRAP, signal.SIGSTOP)
            self._go_on(thread, 0 if own else number)
        return True

    def _go_on(self, thread: int, number: int = 0) -> None:
        with contextlib.suppress(ProcessLookupError):
            next_call(thread, number)

    def _at_call(self, thread: int) -> None:
        try:
            stop = read_stop(thread)
            if stop.entering:
                self._entering(thread, stop)
            else:
                self._leaving(thread, stop)
        except (ProcessLookupError, FileNotFoundError):
            # The thread was killed in the meantime.
            return

    def _entering(self, thread: int, stop: Stop) -> None:
        name = CALLS.get(stop.number)
        if name is None:
            return
        try:
            operation = operation_of(name, thread, stop.arguments)
        except NotOffered:
            self._kill()
            raise
        except OSError:
            # The call itself will fail too, for example because a descriptor is not open.
            return
        if operation is None or not self._concerns(operation):
            return
        if self._strikes(operation):
            self._ended.hit = self._ended.hit or operation
            if self._fault is None or self._fault.error is None:
                self._kill()
            else:
                fail_call(thread, None)
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

    def _leaving(self, thread: int, stop: Stop) -> None:
        if thread in self._failing:
            self._failing.discard(thread)
            assert self._fault is not None
            assert self._fault.error is not None
            fail_call(thread, self._fault.error)
            return
        operation = self._doing.pop(thread, None)
        if operation is None or stop.result < 0:
            return
        if operation.kind == "write":
            operation = Operation("write", operation.path, None, operation.offset, operation.data[: stop.result])
        elif operation.kind == "copy":
            operation = Operation("copy", operation.path, data=operation.path.read_bytes())
        self._ended.operations.append(operation)


# --------------------------------------------------------------------------- file systems that cannot exchange names

_RENAMEAT2: Final = {"x86_64": (0xC000003E, 316), "aarch64": (0xC00000B7, 276)}
"""This machine's architecture number in the data of a seccomp filter, and the number of the system call."""

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _MACHINE, _FLAGS = 0, 4, 16 + 4 * 8
"""Offsets of the system call, the architecture and the fifth argument in that data."""

_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def refuse_exchange() -> None:
    """Make every exchange of two names fail in this process and its children, permanently; call it in a forked child.

    Raises:
        NotOffered: seccomp filters are not available on this machine.
    """
    if sys.platform != "linux" or platform.machine() not in _RENAMEAT2:
        raise _not_offered("The filter is implemented for Linux on x86-64 and ARM64.")
    machine, number = _RENAMEAT2[platform.machine()]
    steps = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 0, 5, machine),
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 3, number),
        (_LOAD, 0, 0, _FLAGS),
        (_ANY_BIT, 0, 1, _EXCHANGE),
        (_RETURN, 0, 0, _ERROR | errno.EINVAL),
        (_RETURN, 0, 0, _ALLOW),
    ]
    text = b"".join(struct.pack("HBBI", *step) for step in steps)
    memory = ctypes.create_string_buffer(text, len(text))
    program = _Program(len(steps), ctypes.addressof(memory))
    call = ctypes.CDLL(None, use_errno=True).prctl
    call.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, ctypes.addressof(program), 0, 0)):
        if call(*arguments) != 0:
            raise _not_offered(f"prctl: {os.strerror(ctypes.get_errno())}")


def _not_offered(reason: str) -> NotOffered:
    return NotOffered("Cannot make exchanges of two names fail.", reason, "Run this test on another machine.")
