"""A process that cannot exchange two names in one step, as on NFS and many file systems in user space.

A filter of the kernel (seccomp) answers `renameat2` with `RENAME_EXCHANGE` as such a file system does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from typing import Final

from accel_state.errors import NotOffered

__all__ = ("refuse_exchange",)

_RENAMEAT2: Final = {"x86_64": (0xC000003E, 316), "aarch64": (0xC00000B7, 276)}
"""Identity of the machine in the data that a filter reads, and the number of the call there."""

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER, _MACHINE, _FLAGS = 0, 4, 16 + 4 * 8
"""Where the call, the machine and the fifth argument are in that data."""

_EXCHANGE: Final = 2
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def refuse_exchange() -> None:
    """Let every exchange of two names fail in this process and what it starts, for good; call it in a forked child.

    Raises:
        NotOffered: this machine has no such filter.
    """
    if sys.platform != "linux" or platform.machine() not in _RENAMEAT2:
        raise _not_offered("Linux on x86-64 and ARM64 has such filters.")
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
    return NotOffered("Exchanges of two names were to fail.", reason, "Run this test on another machine.")
