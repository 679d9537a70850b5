"""File operations, as they are read from the system calls of a traced process."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from accel_state.errors import NotOffered

__all__ = ("Operation", "operation_of")

_AT_FDCWD: Final = 0xFFFFFF9C
_CREATES, _TRUNCATES = os.O_CREAT, os.O_TRUNC
_EXCHANGE: Final = 2
_AT_REMOVEDIR: Final = 0x200
_LONGEST_PATH: Final = 4096


@dataclass(frozen=True)
class Operation:
    """One operation.

    Args:
        kind: "create", "write", "truncate", "fsync", "rename", "exchange", "mkdir", "rmdir", "unlink", "link",
            "symlink" or "copy".
        path: what it works on.
        other: the second path of a rename or a link; the target text of a symlink.
        offset: where is written; the new length of a truncation.
        data: what is written.
    """

    kind: str
    path: Path
    other: Path | None = None
    offset: int = 0
    data: bytes = b""


class _Call:
    """A call of a stopped thread, with access to its memory."""

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
        """The path in an argument, relative to the folder that is open under another argument."""
        address = self.arguments[index]
        # A path may end where memory ends.
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
        """The path of what is open under the descriptor in an argument."""
        return Path(os.readlink(f"/proc/{self._thread}/fd/{self.arguments[index] & 0xFFFFFFFF}"))

    def position(self, index: int) -> int:
        """Where the descriptor in an argument stands."""
        descriptor = self.arguments[index] & 0xFFFFFFFF
        with open(f"/proc/{self._thread}/fdinfo/{descriptor}") as file:
            facts = dict(line.split(":", 1) for line in file if ":" in line)
        if int(facts["flags"], 8) & os.O_APPEND:
            return os.stat(f"/proc/{self._thread}/fd/{descriptor}").st_size
        return int(facts["pos"])

    def pieces(self) -> bytes:
        """What the vector of a `writev` holds."""
        address, count = self.arguments[1], self.arguments[2]
        places = struct.iter_unpack("<QQ", self.memory(address, 16 * count))
        return b"".join(self.memory(base, size) for base, size in places)


def operation_of(name: str, thread: int, arguments: tuple[int, ...]) -> Operation | None:
    """The operation of a call that is about to happen; None when it changes nothing.

    Raises:
        NotOffered: files are written in a way that cannot be recorded.
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
            f"{call.opened(4)} (descriptor {descriptor}) is written through memory.",
            "Write it through calls in what is tested.",
        )


def _of_names(name: str, call: _Call) -> Operation | None:
    """Operations on entries of folders."""
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
