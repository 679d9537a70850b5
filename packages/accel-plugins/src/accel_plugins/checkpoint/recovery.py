"""What saves that did not end have left: put a checkpoint back under its name, and remove what nobody uses.

A save writes into a folder `<name>.staged-<token>`, and moves the folder that it replaces to such a name. What is in
the folder says what it is:

- a manifest: a complete checkpoint, not yet in place or replaced;
- a partial manifest: incomplete, or being removed;
- other files alone: a folder of another library that was replaced;
- nothing: its save has only begun.

Nothing is removed while the lock of a folder says that somebody uses it; see `checkpoint.locks`.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_plugins.checkpoint.foreign_files import ForeignFiles
from accel_plugins.checkpoint.locks import PARTIAL_NAME, FolderLock
from accel_plugins.checkpoint.manifest import verify

__all__ = (
    "erase",
    "is_in_use",
    "is_incomplete",
    "is_staged",
    "located",
    "missing",
    "recover",
    "remove",
    "retire",
    "serial_of",
    "staged_path",
    "stands",
    "unfinished",
)

logger = logging.getLogger(__name__)

_STAGED_NAME: Final = re.compile(r"(?P<name>.+)\.staged-[0-9a-f]{16}", re.DOTALL)
_RENAME_TIMEOUT_S: Final = 2.0
"""Seconds to wait for a running save that has moved the previous checkpoint aside."""


def staged_path(target: Path, token: str) -> Path:
    """The name beside a checkpoint under which a save writes; `token` is 16 random hexadecimal digits."""
    return target.with_name(f"{target.name}.staged-{token}")


def is_staged(path: Path) -> bool:
    """Whether a path has such a name."""
    return _STAGED_NAME.fullmatch(path.name) is not None


def stands(target: Path) -> bool:
    """Whether a name has a folder with content, which is not incomplete, or a file."""
    try:
        return bool(os.listdir(target)) and not is_incomplete(target)
    except OSError:
        return os.path.exists(target)


def is_incomplete(folder: Path) -> bool:
    """Whether a folder has a partial manifest: it is being written or removed."""
    return (folder / PARTIAL_NAME).is_file() and not (folder / MANIFEST_NAME).is_file()


def unfinished(parent: Path) -> list[Path]:
    """Folders that saves have not completed, or have moved aside."""
    return [entry for entry in _entries(parent) if is_staged(entry)]


def missing(parent: Path) -> list[str]:
    """Names of missing checkpoints that can be put back."""
    names = {_name(entry) for entry in unfinished(parent) if _rank(entry) is not None}
    return sorted(name for name in names if not stands(parent / name))


def is_in_use(entry: Path) -> bool:
    """Whether a folder may be in use: somebody has its lock, or nothing proves that its save has ended."""
    lock = FolderLock.seize(entry)
    if lock is not None:
        lock.close()
    return lock is None


def serial_of(folder: Path) -> int:
    """The number of a checkpoint among those that were saved under one name; 0 if it has none."""
    manifest = verify(folder).manifest
    serial = None if manifest is None else manifest.facts.get("serial")
    return serial if type(serial) is int else 0


def located(target: Path) -> Path | None:
    """The path from which to read a checkpoint, after one that was moved aside is put back; removes nothing.

    Returns:
        `target`. If it is missing and cannot be put back, as on a read-only file system, the folder that would be; None
        if there is none either.
    """
    if stands(target):
        return target
    real = Path(os.path.realpath(target))
    until = time.monotonic() + _RENAME_TIMEOUT_S
    while not stands(real):
        best = _best(entry for entry in unfinished(real.parent) if _name(entry) == real.name)
        if best is None:
            break
        if is_in_use(best) and time.monotonic() < until:
            time.sleep(0.02)
        elif not _is_put_back(best, real) and best.is_dir():
            logger.warning("%s is read from %s, because it cannot be restored.", target, best)
            return best
    is_empty = target.is_dir() and not is_incomplete(target)
    return target if is_empty or stands(target) else None


def recover(parent: Path) -> None:
    """Put checkpoints back that ended saves had moved aside, and remove what nobody uses."""
    left: dict[str, list[Path]] = defaultdict(list)
    for entry in _entries(parent):
        if is_staged(entry):
            left[_name(entry)].append(entry)
        elif is_incomplete(entry):
            # Its removal did not end.
            _clear(entry)
    for name, entries in left.items():
        target = parent / name
        if not stands(target) and (best := _best(entries)) is not None and not is_in_use(best):
            _is_put_back(best, target)
        for entry in entries:
            if not stands(entry):
                _clear(entry)
            elif stands(target):
                retire(entry, target)


def _clear(entry: Path) -> None:
    try:
        remove(entry)
    except OSError as error:
        logger.warning("%s, which a save left behind, cannot be removed yet: %s", entry, error)


def retire(entry: Path, target: Path, *, fsync: bool = True) -> bool:
    """Remove a replaced folder, unless it is in use; foreign files in it are carried into `target` before.

    Returns:
        Whether it is gone.
    """
    try:
        if not (entry / MANIFEST_NAME).exists():
            # Another library's: it gets the lock that removals need once all of it is carried.
            ForeignFiles(entry, target, fsync=fsync).carry()
            FolderLock.mark(entry).close()
            return remove(entry)
        lock = FolderLock.seize(entry)
        if lock is None:
            return not os.path.lexists(entry)
        with lock:
            ForeignFiles(lock.path, target, fsync=fsync).carry()
            erase(lock)
    except OSError as error:
        logger.warning("%s, which %s replaced, cannot be removed yet: %s", entry, target, error)
    return not os.path.lexists(entry)


def remove(folder: Path, *, by_user: bool = False) -> bool:
    """Remove a checkpoint or an incomplete one, unless it is in use.

    Args:
        folder: the folder.
        by_user: a user named it; see `FolderLock.seize`.

    Returns:
        Whether it is gone.

    Raises:
        OSError: it cannot be removed.
    """
    lock = FolderLock.seize(folder, by_user=by_user)
    if lock is None:
        # An empty folder has no lock, and nothing else is removed here.
        with suppress(OSError):
            folder.rmdir()
        return not os.path.lexists(folder)
    with lock:
        erase(lock)
    return not os.path.lexists(folder)


def erase(lock: FolderLock) -> None:
    """Remove an open folder and close it. Interrupted at any place, this leaves nothing that looks like a checkpoint.

    Everything is removed through the open folder, so that another one that takes its name meanwhile is not touched.

    Raises:
        OSError: something cannot be removed.
    """
    lock.uncommit()
    if lock.descriptor is None:
        shutil.rmtree(lock.folder)
    else:
        _empty(lock.descriptor, keep=PARTIAL_NAME)
        with suppress(FileNotFoundError):
            os.unlink(PARTIAL_NAME, dir_fd=lock.descriptor)
    # On network file systems a file that is open keeps its folder from being removed.
    lock.close()
    try:
        lock.folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise


def _empty(folder: int, keep: str | None = None) -> None:
    for entry in list(os.scandir(folder)):
        if entry.name == keep:
            continue
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.name, dir_fd=folder)
            continue
        inner = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
        try:
            if os.fstat(inner).st_dev != os.fstat(folder).st_dev:
                raise OSError(errno.EBUSY, "a file system is mounted inside", entry.name)
            _empty(inner)
        finally:
            os.close(inner)
        os.rmdir(entry.name, dir_fd=folder)


def _is_put_back(entry: Path, target: Path) -> bool:
    try:
        remove(target)
        entry.rename(target)
    except OSError as error:
        logger.warning("%s could not be restored as %s: %s", entry, target.name, error)
        return False
    logger.warning("%s was restored as %s: the run that saved it did not finish.", entry.name, target)
    return True


def _best(entries: Iterable[Path]) -> Path | None:
    """The folder to put back under the name."""
    ranked = [(rank, entry) for entry in entries if (rank := _rank(entry)) is not None]
    return max(ranked)[1] if ranked else None


def _rank(entry: Path) -> tuple[int, int] | None:
    """Sort key of candidates for a missing checkpoint: a good one, then the latest, then another library's."""
    if not stands(entry):
        return None
    verdict = verify(entry)
    if verdict.manifest is None and not verdict.damage:
        return 0, 0
    return (2 if verdict.good else 1), serial_of(entry)


def _entries(parent: Path) -> list[Path]:
    try:
        return sorted(parent.iterdir())
    except OSError:
        return []


def _name(entry: Path) -> str:
    match = _STAGED_NAME.fullmatch(entry.name)
    assert match is not None, entry
    return match["name"]
