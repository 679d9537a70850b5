"""Who works beside a name: a record file that its owner locks, and touches every half minute until the work is done.

Whether an owner still runs is decided by the strongest evidence at hand. On one kernel and one mount, the lock: the
kernel frees it when the owner dies, in whatever container that is. Within one PID namespace, the process and when it
started: a restarted container may give the same number to another process. Everything else (another machine, a file
system without locks) cannot be observed, so there the record's age decides, measured by the clock of the file system.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

__all__ = ("RECORD", "Claim", "age", "taken_over")

RECORD: Final = re.compile(r"(?P<name>.+)\.owner-(?P<token>[0-9a-f]{16})")

_RENEWED: Final = 30.0
"""Seconds between two touches of a record."""

_LEASE: Final = 600.0
"""Seconds without a touch after which an owner that cannot be observed counts as gone."""

_LONGEST_RECORD: Final = 4096


@dataclass(frozen=True)
class _Owner:
    """What tells one process from every other.

    Args:
        host: name of the machine, for people.
        boot: identity of this run of the kernel; empty where it has none.
        pid_namespace: inode of the PID namespace.
        pid: number of the process in it.
        started: when the process started, in clock ticks since the kernel did.
        device: of the file system that the record is in, as this kernel numbers it.
        lock: whether a lock on the record keeps others out.
    """

    host: str
    boot: str
    pid_namespace: int
    pid: int
    started: int
    device: int
    lock: bool

    @classmethod
    def read(cls, file: int) -> _Owner | None:
        """The owner that an open record names; None where it is empty or half written."""
        try:
            found = json.loads(os.pread(file, _LONGEST_RECORD, 0))
            owner = cls(**found)
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        fields = (owner.pid_namespace, owner.pid, owner.started, owner.device)
        return owner if all(type(field) is int for field in fields) and type(owner.boot) is str else None


class Claim:
    """The right to make and remove folders beside a name, until it is released.

    Args:
        target: the name.
        token: what the names of these folders end with; random when None.

    Raises:
        FileExistsError: the token is in use.
        OSError: nothing can be written there.
    """

    def __init__(self, target: Path, token: str | None = None) -> None:
        self._target = target
        self.token = token or secrets.token_hex(8)
        self._record = self.path("owner")
        self._released = threading.Event()
        self._renewer: threading.Thread | None = None
        self._file: int | None = os.open(self._record, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        _held.add(self)
        try:
            # The content comes after the lock: a record that says it is locked has been since it said so.
            self._text = json.dumps(asdict(_this_process(self._file, _locked(self._file, self._record)))).encode()
            if os.write(self._file, self._text) < len(self._text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._record))
        except OSError:
            self.release()
            raise
        renewer = threading.Thread(target=self._renew, name="accel-lease", daemon=True)
        # While a program ends no thread starts, from Python 3.12 on; the lease outlasts that.
        with suppress(RuntimeError):
            renewer.start()
            self._renewer = renewer

    def path(self, kind: str) -> Path:
        """A name beside the target: "tmp" for what comes in, "old" for what was there, "del" for what goes."""
        return self._target.with_name(f"{self._target.name}.{kind}-{self.token}")

    @property
    def holds(self) -> bool:
        """Whether nobody took over: whoever does removes the record."""
        try:
            return self._record.read_bytes() == self._text
        except OSError:
            return False

    def _renew(self) -> None:
        while not self._released.wait(_RENEWED):
            with suppress(OSError):
                os.utime(self._record)

    def release(self) -> None:
        """Give up the claim; the record stays while a folder is left, so that it is known to have no owner."""
        if self._file is None:
            return
        if self._renewer is not None:
            self._released.set()
            self._renewer.join()
        self._close()
        if not any(os.path.lexists(self.path(kind)) for kind in ("tmp", "old", "del")):
            with suppress(OSError):
                self._record.unlink()

    def _close(self) -> None:
        _held.discard(self)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_held: Final[set[Claim]] = set()


def _let_go_in_child() -> None:
    """A forked process shares the locks of its parent, and must not keep them when that dies."""
    for claim in tuple(_held):
        claim._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


@contextmanager
def taken_over(record: Path) -> Iterator[bool]:
    """Whether the owner that a record names is gone; where locks work, nobody else takes over during the block."""
    try:
        file = _opened(record)
    except OSError:
        yield False
        return
    try:
        yield _is_gone(file, record)
    finally:
        os.close(file)


def _opened(record: Path) -> int:
    try:
        return os.open(record, os.O_RDWR)
    except OSError:
        # Read-only, or another user's: it can be looked at all the same.
        return os.open(record, os.O_RDONLY)


def _is_gone(file: int, record: Path) -> bool:
    owner, here = _Owner.read(file), _this_process(file, False)
    if owner is not None and owner.boot == here.boot != "":
        if owner.lock and owner.device == here.device and (free := _lock(file)) is not None:
            return free and os.path.lexists(record)
        if owner.pid_namespace == here.pid_namespace != 0:
            return not _runs(owner.pid, owner.started)
    idle = age(os.fstat(file).st_mtime, record.parent)
    return idle is not None and idle > _LEASE


def age(changed: float, folder: Path) -> float | None:
    """Seconds since a time that the file system of a folder gave; None if it does not report its time.

    A file server has a clock of its own, so a fresh file tells what it is now.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_mtime - changed
    except OSError:
        return None


def _locked(file: int, path: Path) -> bool:
    """Lock an open file, and look whether that keeps a second opening out: some file systems pretend."""
    if not _lock(file):
        return False
    second = os.open(path, os.O_RDWR)
    try:
        return _lock(second) is False
    finally:
        os.close(second)


def _lock(file: int) -> bool | None:
    """Take the lock of an open file without waiting; False: another has it, None: there are no locks here."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _this_process(file: int, lock: bool) -> _Owner:
    boot, namespace, started = "", 0, 0
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        if os.readlink("/proc/self") == str(os.getpid()):
            # Otherwise /proc shows the processes of another namespace.
            namespace, started = os.stat("/proc/self/ns/pid").st_ino, _process("self")[1]
    return _Owner(socket.gethostname(), boot, namespace, os.getpid(), started, os.fstat(file).st_dev, lock)


def _runs(pid: int, started: int) -> bool:
    """Whether a process that started at a time still runs, as far as this PID namespace shows."""
    try:
        state, began = _process(str(pid))
    except OSError:
        return _is_hidden(pid)
    return state not in ("Z", "X") and began == started


def _is_hidden(pid: int) -> bool:
    """Whether there is a process that /proc does not show, as it may hide those of other users."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _process(name: str) -> tuple[str, int]:
    """State of a process and when it started, in clock ticks since the kernel did."""
    line = Path(f"/proc/{name}/stat").read_text(encoding="ascii", errors="replace")
    # The second field is a name in brackets that may hold anything.
    fields = line.rpartition(")")[2].split()
    return fields[0], int(fields[19])
