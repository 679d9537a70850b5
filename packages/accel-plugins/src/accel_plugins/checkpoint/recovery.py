"""Recover from runs that died while saving: restore checkpoints that were moved aside, and remove other leftovers.

The name of a temporary folder ends with its kind and a token: "tmp" is being written, "old" was moved aside, "del" is
being removed. Folders with the same token belong to the record of that token: a file that its owner locks, and touches
every half minute until the work is done.

The strongest available evidence decides whether an owner still runs. On the same kernel and mount it is the lock, which
the kernel frees when the owner dies, in any container. Within one PID namespace it is the process with its start time,
because a restarted container may reuse a process id. In all other cases (another machine, a file system without locks)
the owner cannot be observed, so the record's age decides, measured by the clock of the file system.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from accel_plugins.checkpoint.files import MANIFEST_NAME, walk
from accel_plugins.checkpoint.manifest import verify
from accel_state.untrusted import read_limited

__all__ = (
    "RECORD",
    "Claim",
    "age",
    "discard",
    "fingerprint",
    "is_stale",
    "located",
    "missing",
    "recover",
    "taken_over",
    "unfinished",
)

logger = logging.getLogger(__name__)

RECORD: Final = re.compile(r"(?P<name>.+)\.owner-(?P<token>[0-9a-f]{16})", re.DOTALL)

_RENEWED: Final = 30.0
"""Seconds between two touches of a record."""

_LEASE: Final = 600.0
"""Seconds without a touch after which an owner that cannot be observed counts as dead."""

_LONGEST_RECORD: Final = 4096

_BESIDE: Final = re.compile(
    r"(?P<name>.+)\.(?P<kind>tmp|old|del)-(?:(?P<token>[0-9a-f]{16})|[0-9a-f]{8}-\d+-[0-9a-f]{8})", re.DOTALL
)
"""The second form has no record: it names a host and a process, as version 0.1.0 did."""
_FORGOTTEN: Final = 24 * 3600.0
"""Seconds without a change after which a folder without a record counts as abandoned."""
_BETWEEN_RENAMES: Final = 2.0
"""Seconds to wait for a running process to replace the checkpoint that it moved aside."""


@dataclass(frozen=True)
class _Owner:
    """The unique identity of a process.

    Args:
        host: name of the machine, for messages.
        boot: the boot id of the kernel; empty if it has none.
        pid_namespace: inode of the PID namespace.
        pid: the process id in this namespace.
        started: start time of the process, in clock ticks since boot.
        device: this kernel's device number of the file system of the record.
        lock: whether the record is locked.
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
        """The owner in an open record; None if it is empty or incomplete."""
        try:
            found = json.loads(os.pread(file, _LONGEST_RECORD, 0))
            owner = cls(**found)
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        fields = (owner.pid_namespace, owner.pid, owner.started, owner.device)
        return owner if all(type(field) is int for field in fields) and type(owner.boot) is str else None


class Claim:
    """The right to create and remove temporary folders for a name, until it is released.

    Args:
        target: the name.
        token: the end of the names of these folders; None: random.

    Raises:
        FileExistsError: the token is in use.
        OSError: writing there fails.
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
            # Written after locking, so that every record that reports a lock has been locked from the start.
            self._text = json.dumps(asdict(_this_process(self._file, _locked(self._file, self._record)))).encode()
            if os.write(self._file, self._text) < len(self._text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._record))
        except OSError:
            self.release()
            raise
        renewer = threading.Thread(target=self._renew, name="accel-lease", daemon=True)
        # Python 3.12 and newer cannot start threads while a program ends; the lease is long enough for that time.
        with suppress(RuntimeError):
            renewer.start()
            self._renewer = renewer

    def path(self, kind: str) -> Path:
        """The name of a temporary folder: "tmp" for a new, "old" for a previous, "del" for a removed checkpoint."""
        return self._target.with_name(f"{self._target.name}.{kind}-{self.token}")

    @property
    def holds(self) -> bool:
        """Whether no other process took over, which would remove the record."""
        try:
            return self._record.read_bytes() == self._text
        except OSError:
            return False

    def _renew(self) -> None:
        while not self._released.wait(_RENEWED):
            with suppress(OSError):
                os.utime(self._record)

    def release(self) -> None:
        """Release the claim. The record remains while a folder is left, so that others see that it has no owner."""
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
    """A forked process shares its parent's locks, and must not hold them after the parent's death."""
    for claim in tuple(_held):
        claim._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)


@contextmanager
def taken_over(record: Path) -> Iterator[bool]:
    """A context that returns whether a record's owner is dead; with locks, no other process takes over inside."""
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
        # It is read-only or belongs to another user; reading is enough.
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
    """Seconds since a timestamp of the folder's file system; None if its current time is unknown.

    A file server has a separate clock; a new file shows its current time.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_mtime - changed
    except OSError:
        return None


def _locked(file: int, path: Path) -> bool:
    """Lock an open file, and check that a second lock fails: some file systems do not really lock."""
    if not _lock(file):
        return False
    second = os.open(path, os.O_RDWR)
    try:
        return _lock(second) is False
    finally:
        os.close(second)


def _lock(file: int) -> bool | None:
    """Lock an open file without waiting; False: another process has the lock, None: locks are not supported."""
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
            # If not, /proc shows the processes of another namespace.
            namespace, started = os.stat("/proc/self/ns/pid").st_ino, _process("self")[1]
    return _Owner(socket.gethostname(), boot, namespace, os.getpid(), started, os.fstat(file).st_dev, lock)


def _runs(pid: int, started: int) -> bool:
    """Whether the process with this start time still runs in this PID namespace."""
    try:
        state, began = _process(str(pid))
    except OSError:
        return _is_hidden(pid)
    return state not in ("Z", "X") and began == started


def _is_hidden(pid: int) -> bool:
    """Whether a process exists that /proc does not show; /proc may hide processes of other users."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _process(name: str) -> tuple[str, int]:
    """State and start time of a process, in clock ticks since boot."""
    line = Path(f"/proc/{name}/stat").read_text(encoding="ascii", errors="replace")
    # The second field is a name in brackets with any characters.
    fields = line.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def located(target: Path) -> Path | None:
    """The path from which to read a checkpoint. First restores one that a dead run moved aside; removes nothing.

    Returns:
        `target`. If it is missing and the folder is read-only, the complete checkpoint that would be restored; None if
        there is none either.
    """
    if target.exists():
        return target
    real = Path(os.path.realpath(target))
    until = time.monotonic() + _BETWEEN_RENAMES
    while not real.exists():
        left = [entry for entry in unfinished(real.parent) if _name(entry) == real.name]
        if any(_kind(entry) == "old" and not is_stale(entry) for entry in left) and time.monotonic() < until:
            time.sleep(0.02)
            continue
        # Restored even if its owner may be running, which then moves it aside again.
        found = _best(entry for entry in left if _kind(entry) == "old" or is_stale(entry))
        if found is None or _is_put_back(found, real):
            break
        if os.path.isdir(found):
            logger.warning("%s is read from %s, because it cannot be restored.", target, found)
            return found
    return target if target.exists() else None


def recover(parent: Path) -> None:
    """Restore checkpoints that dead processes moved aside, and remove their leftovers."""
    dead: dict[str, list[Path]] = defaultdict(list)
    records: list[Path] = []
    with ExitStack() as claimed:
        for record, entries in _groups(parent):
            if claimed.enter_context(_gone(record, entries)):
                records += [] if record is None else [record]
                for entry in entries:
                    dead[_name(entry)].append(entry)
        for name, entries in dead.items():
            _settle(parent / name, entries)
    for record in records:
        if not any(os.path.lexists(entry) for entry in _folders_of(record)):
            with suppress(OSError):
                record.unlink()


def unfinished(parent: Path) -> list[Path]:
    """Folders that saves have not completed, or have moved aside."""
    return sorted(entry for entry in _entries(parent) if _BESIDE.fullmatch(entry.name))


def missing(parent: Path) -> list[str]:
    """Names of missing checkpoints with a temporary folder that may be restored."""
    names = {_name(entry) for entry in unfinished(parent) if _kind(entry) != "del"}
    return sorted(name for name in names if not os.path.lexists(parent / name))


def is_stale(entry: Path) -> bool:
    """Whether the process that created one of these folders is dead."""
    token = _parts(entry)["token"]
    record = entry.with_name(f"{_name(entry)}.owner-{token}")
    with _gone(record if token and os.path.lexists(record) else None, [entry]) as gone:
        return gone


def discard(entry: Path) -> None:
    """Remove one of these folders, if it exists; `recover` later removes what cannot be removed now.

    It is renamed first, so that an interrupted removal leaves nothing that looks like a checkpoint.
    """
    doomed = entry.with_name(f"{_name(entry)}.del-{_parts(entry)['token'] or secrets.token_hex(8)}")
    try:
        entry.rename(doomed)
    except FileNotFoundError:
        return
    except OSError:
        doomed = entry
    shutil.rmtree(doomed, ignore_errors=True)


def fingerprint(folder: Path) -> tuple[int, bytes | None]:
    """Values that change when another checkpoint replaces a folder, or its entries change."""
    changed = folder.stat().st_mtime_ns
    try:
        return changed, read_limited(folder / MANIFEST_NAME)
    except OSError:
        return changed, None


def _settle(target: Path, entries: list[Path]) -> None:
    """Restore one of the leftover folders of a name, if the name is free, and remove the others."""
    if not os.path.lexists(target) and (found := _best(entries)) is not None:
        _is_put_back(found, target)
    for entry in entries:
        if os.path.lexists(target) or _rank(entry) is None:
            discard(entry)


def _is_put_back(entry: Path, target: Path) -> bool:
    try:
        entry.rename(target)
    except OSError as error:
        logger.warning("%s could not be restored as %s: %s", entry, target.name, error)
        return False
    logger.warning("%s was restored as %s: the run that saved it did not finish.", entry.name, target)
    return True


def _best(entries: Iterable[Path]) -> Path | None:
    """The leftover folder to restore under the name."""
    ranked = [(rank, entry) for entry in entries if (rank := _rank(entry)) is not None]
    return max(ranked)[1] if ranked else None


def _rank(entry: Path) -> tuple[int, float] | None:
    """Sort key of candidates for a missing checkpoint: one that already had the name is preferred to a new one."""
    if _kind(entry) == "del":
        return None
    verdict = verify(entry)
    written = verdict.manifest.written if verdict.manifest is not None else 0.0
    if _kind(entry) == "old":
        return (0 if verdict.damage else 2), written
    return (1, written) if verdict.good else None


def _groups(parent: Path) -> list[tuple[Path | None, list[Path]]]:
    """The record and the folders of each owner."""
    records = {}
    folders: dict[str, list[Path]] = defaultdict(list)
    for entry in _entries(parent):
        if match := RECORD.fullmatch(entry.name):
            records[match["token"]] = entry
        elif match := _BESIDE.fullmatch(entry.name):
            folders[match["token"] or entry.name].append(entry)
    return [(records.get(token), folders[token]) for token in sorted(records.keys() | folders.keys())]


@contextmanager
def _gone(record: Path | None, entries: list[Path]) -> Iterator[bool]:
    """Whether the owner of a group is dead."""
    if record is None:
        yield all(map(_is_forgotten, entries))
        return
    with taken_over(record) as gone:
        yield gone


def _is_forgotten(entry: Path) -> bool:
    """Whether a folder without a record has not changed for a long time."""
    try:
        changed = max(path.stat().st_mtime for path in (entry, *walk(entry)))
    except OSError:
        return False
    idle = age(changed, entry.parent)
    return idle is not None and idle > _FORGOTTEN


def _folders_of(record: Path) -> list[Path]:
    match = RECORD.fullmatch(record.name)
    assert match is not None
    return [record.with_name(f"{match['name']}.{kind}-{match['token']}") for kind in ("tmp", "old", "del")]


def _entries(parent: Path) -> list[Path]:
    try:
        return sorted(parent.iterdir())
    except OSError:
        return []


def _parts(entry: Path) -> re.Match[str]:
    match = _BESIDE.fullmatch(entry.name)
    assert match is not None, entry
    return match


def _name(entry: Path) -> str:
    return _parts(entry)["name"]


def _kind(entry: Path) -> str:
    return _parts(entry)["kind"]
