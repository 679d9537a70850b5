"""What runs that died left beside the names of checkpoints: it is put back where a name is missing, and else removed.

A folder beside a name ends with its kind and a token: "tmp" is on its way in, "old" had the name and was moved
aside, "del" is being removed. Folders of one token belong to the record of that token: a file that its owner locks,
and touches every half minute until the work is done.

Whether an owner still runs is decided by the strongest evidence at hand. On one kernel and one mount, the lock: the
kernel frees it when the owner dies, in whatever container that is. Within one PID namespace, the process and when it
started: a restarted container may give the same number to another process. Everything else (another machine, a file
system without locks) cannot be observed, so there the record's age decides, measured by the clock of the file system.
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
"""Seconds without a touch after which an owner that cannot be observed counts as gone."""

_LONGEST_RECORD: Final = 4096

_BESIDE: Final = re.compile(
    r"(?P<name>.+)\.(?P<kind>tmp|old|del)-(?:(?P<token>[0-9a-f]{16})|[0-9a-f]{8}-\d+-[0-9a-f]{8})", re.DOTALL
)
"""The second form has no record: it names a host and a process, as version 0.1.0 did."""
_FORGOTTEN: Final = 24 * 3600.0
"""Seconds without a change after which a folder without a record counts as left behind."""
_BETWEEN_RENAMES: Final = 2.0
"""Seconds to wait for a process that lives to put its checkpoint in place of the one that it moved aside."""


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


def located(target: Path) -> Path | None:
    """Where a checkpoint is to be read; what a run that died had moved aside is put back first, and nothing removed.

    Returns:
        `target`; where it is missing and the folder can only be read, the whole checkpoint beside it that would have
        been put there; None when there is neither.
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
        # What had the name is put back even where its owner may live: that one then moves it aside again.
        found = _best(entry for entry in left if _kind(entry) == "old" or is_stale(entry))
        if found is None or _is_put_back(found, real):
            break
        if os.path.isdir(found):
            logger.warning("%s is read from %s, because it cannot be put back.", target, found)
            return found
    return target if target.exists() else None


def recover(parent: Path) -> None:
    """Put back what dead processes moved aside, and remove what they left half done; what may live is left alone."""
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
    """Folders that saves have not completed, or had moved aside."""
    return sorted(entry for entry in _entries(parent) if _BESIDE.fullmatch(entry.name))


def missing(parent: Path) -> list[str]:
    """Names that no folder has, although one that may be put back is beside them."""
    names = {_name(entry) for entry in unfinished(parent) if _kind(entry) != "del"}
    return sorted(name for name in names if not os.path.lexists(parent / name))


def is_stale(entry: Path) -> bool:
    """Whether the process that made one of these folders is gone."""
    token = _parts(entry)["token"]
    record = entry.with_name(f"{_name(entry)}.owner-{token}")
    with _gone(record if token and os.path.lexists(record) else None, [entry]) as gone:
        return gone


def discard(entry: Path) -> None:
    """Remove one of these folders, where it is still there; what cannot be removed is left for `recover`.

    It is renamed first, so that a removal that is cut short leaves nothing that looks like a checkpoint.
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
    """What differs when another checkpoint has taken the name of a folder, or its entries have changed."""
    changed = folder.stat().st_mtime_ns
    try:
        return changed, read_limited(folder / MANIFEST_NAME)
    except OSError:
        return changed, None


def _settle(target: Path, entries: list[Path]) -> None:
    """Put one of the folders that the dead left for a name in its place if that is free, and remove the others."""
    if not os.path.lexists(target) and (found := _best(entries)) is not None:
        _is_put_back(found, target)
    for entry in entries:
        if os.path.lexists(target) or _rank(entry) is None:
            discard(entry)


def _is_put_back(entry: Path, target: Path) -> bool:
    try:
        entry.rename(target)
    except OSError as error:
        logger.warning("%s could not be put back as %s: %s", entry, target.name, error)
        return False
    logger.warning("%s was put back as %s: the run that saved it did not finish.", entry.name, target)
    return True


def _best(entries: Iterable[Path]) -> Path | None:
    """Which of the folders left for a name is to have it."""
    ranked = [(rank, entry) for entry in entries if (rank := _rank(entry)) is not None]
    return max(ranked)[1] if ranked else None


def _rank(entry: Path) -> tuple[int, float] | None:
    """How well a folder replaces a missing checkpoint: what had its name comes before what did not have it yet."""
    if _kind(entry) == "del":
        return None
    verdict = verify(entry)
    written = verdict.manifest.written if verdict.manifest is not None else 0.0
    if _kind(entry) == "old":
        return (0 if verdict.damage else 2), written
    return (1, written) if verdict.good else None


def _groups(parent: Path) -> list[tuple[Path | None, list[Path]]]:
    """What belongs to one owner each: its record and its folders."""
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
    """Whether the owner of a group does not live any more."""
    if record is None:
        yield all(map(_is_forgotten, entries))
        return
    with taken_over(record) as gone:
        yield gone


def _is_forgotten(entry: Path) -> bool:
    """Whether nothing in a folder has changed for long; for folders without a record."""
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
