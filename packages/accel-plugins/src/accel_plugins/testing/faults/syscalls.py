"""What `ptrace` of Linux shows of a traced process: stops at system calls, their arguments and results."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from typing import Final, NamedTuple

__all__ = ("CALLS", "Stop", "fail_call", "follow", "next_call", "obstacle", "read_stop", "trace_me")

_TRACEME, _CONT_TO_CALL, _GETREGS, _SETREGS = 0, 24, 12, 13
_SETOPTIONS, _GET_CALL = 0x4200, 0x420E
_OPTIONS: Final = 0x1 | 0x8 | 0x00100000
"""Mark stops at calls; follow new threads; kill what is traced when the tracer dies."""

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
"""Names by number of the calls that change files, on this machine."""

_REGISTERS: Final = 27
_RAX, _ORIGINAL_RAX = 10, 15


class Stop(NamedTuple):
    """Where a traced thread stands.

    Args:
        entering: before a call, not after it.
        number: which call; 0 after it.
        arguments: of the call; empty after it.
        result: of the call; 0 before it.
    """

    entering: bool
    number: int
    arguments: tuple[int, ...]
    result: int


def obstacle(errors: bool = False) -> str | None:
    """Why file operations cannot be traced here, or None; `errors`: why calls cannot be made to fail."""
    if sys.platform != "linux" or not CALLS:
        return "File operations are traced by ptrace of Linux on x86-64 and ARM64."
    if errors and platform.machine() != "x86_64":
        return "Calls are made to fail on x86-64 only."
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
    """Let the parent trace this process; followed by a SIGSTOP to itself."""
    _ptrace(_TRACEME, 0)


def follow(pid: int) -> None:
    """Say what is wanted of a process that has stopped for the first time."""
    _ptrace(_SETOPTIONS, pid, 0, _OPTIONS)


def next_call(thread: int, signal_number: int = 0) -> None:
    """Let a stopped thread run to its next call, or to the end of the one it is in."""
    _ptrace(_CONT_TO_CALL, thread, 0, signal_number)


def read_stop(thread: int) -> Stop:
    """Where a thread that stopped at a call stands."""
    memory = ctypes.create_string_buffer(88)
    _ptrace(_GET_CALL, thread, len(memory), ctypes.addressof(memory))
    raw = memory.raw
    if raw[0] == 1:
        number, *arguments = struct.unpack_from("<7Q", raw, 24)
        return Stop(True, number, tuple(arguments), 0)
    return Stop(False, 0, (), struct.unpack_from("<q", raw, 24)[0])


def fail_call(thread: int, number: int | None) -> None:
    """Let a call not happen (`number` is None, before it), and return an error (its number, after it)."""
    registers = (ctypes.c_ulong * _REGISTERS)()
    _ptrace(_GETREGS, thread, 0, ctypes.addressof(registers))
    if number is None:
        registers[_ORIGINAL_RAX] = ctypes.c_ulong(-1).value
    else:
        registers[_RAX] = ctypes.c_ulong(-number).value
    _ptrace(_SETREGS, thread, 0, ctypes.addressof(registers))
