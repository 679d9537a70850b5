"""Make a checkpoint valid atomically: it exists if and only if its manifest does.

1. The files are written into a folder with a name that only this save uses, beside the final one.
2. They are hashed and flushed; then the manifest is written and gets its name. Now the checkpoint exists.
3. It gets the final name. If that has a folder, the two exchange their names where the system can; elsewhere the old
   one is moved aside first. If the process dies in between, the next reader puts one of them back.
4. The replaced folder is removed, unless somebody reads it.

Foreign files of the replaced folder are carried over before and after step 3. See `checkpoint.recovery` for what a save
that does not end leaves behind.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accel_ops.agreement import StoreBarrier
from accel_plugins.checkpoint.files import MANIFEST_NAME, fsync_path, shards_of, walk
from accel_plugins.checkpoint.finalize import CheckpointFinalizer, Committed
from accel_plugins.checkpoint.foreign_files import ForeignFiles, take_owner
from accel_plugins.checkpoint.locks import FolderLock
from accel_plugins.checkpoint.recovery import (
    erase,
    is_incomplete,
    is_staged,
    recover,
    remove,
    retire,
    serial_of,
    staged_path,
    stands,
    unfinished,
)
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("exchange", "staging")

_MAX_ATTEMPTS: Final = 100
_MAX_RETRY_PAUSE_S: Final = 0.02
_CONTENTION_ERRNOS: Final = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY)
"""Errors that occur when another run creates or removes a checkpoint of the same name."""

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


class _Staged:
    """The folder of one save, in the process that created it or that works on another node.

    Args:
        path: the folder.
        lock: its lock; None on processes that are not the first of their node.
        is_owner: whether this process created it.
        save: see `Committed`.
        serial: the number of the save among those under this name.
    """

    def __init__(self, path: Path, lock: FolderLock | None, is_owner: bool, save: str, serial: int) -> None:
        self.path, self.lock, self.is_owner, self.save, self.serial = path, lock, is_owner, save, serial
        self.owners: list[int] = []

    def discard(self) -> None:
        """Remove the folder of a save that failed."""
        if self.lock is not None and self.is_owner and self.lock.is_at(self.path):
            with suppress(OSError):
                erase(self.lock)
        self.close()

    def close(self) -> None:
        """Give the lock back."""
        if self.lock is not None:
            self.lock.close()


@contextmanager
def staging(
    target: str | os.PathLike[str],
    process: Process | None = None,
    *,
    facts: Mapping[str, Any] | None = None,
    fsync: bool = True,
    deadline: float = 600.0,
    finalizer: CheckpointFinalizer | None = None,
    barrier: StoreBarrier | None = None,
) -> Iterator[Path]:
    """A temporary folder for a checkpoint; it is renamed to `target` when the block ends without an error.

    Called on every process of the run. Processes on a node that does not share the first process's disk write into a
    folder on their node, which becomes a separate checkpoint there.

    Each process sends at most 12 requests to the run's store, the first at most 3 W + 20 with W processes.

    Args:
        target: path of the checkpoint. An existing folder there is valid until the new one is complete; its files that
            were not written by saving are carried over.
        process: this process; None: the current one.
        facts: data for the manifest.
        fsync: wait until everything is flushed to disk.
        deadline: maximum time in seconds that processes wait for each other.
        finalizer: a finalizer that already flushes files while others are being written.
        barrier: a store barrier that the processes already use; it is continued here and ended at the end.

    Raises:
        CheckpointError: this or another process failed; the existing folder is unchanged.
    """
    if process is None:
        from accel_state import current

        process = current.process_or_start()
    target = Path(os.path.realpath(target))
    finalizer = finalizer or CheckpointFinalizer(fsync)
    failure, remedy = f"Cannot save a checkpoint as {target}.", "Older checkpoints are unchanged."
    if barrier is None:
        barrier = StoreBarrier(process, f"save/{target.name}", failure, deadline, CheckpointError, remedy)
    barrier.describe(failure, remedy)
    staged = _open(target, process, barrier)
    try:
        try:
            yield staged.path
            for shard in shards_of(staged.path, process.rank):
                finalizer.begin(shard)
            records = finalizer.records(staged.path) if process.rank else ""
            barrier.wait("write", records, partial(finalizer.adopt, staged.path))
            if staged.is_owner:
                assert staged.lock is not None
                own = {"world_size": process.world_size, "save": staged.save, "serial": staged.serial}
                finalizer.finalize(staged.lock, {**own, **(facts or {})})
            if staged.owners != [0]:
                barrier.wait("complete", only=staged.owners)
            if staged.is_owner:
                assert staged.lock is not None
                _put_in_place(staged.lock, target, fsync)
        except BaseException as error:
            if isinstance(error, (OSError, CheckpointError)):
                # A process that fails takes the folder away under the hands of the others; theirs is then not the first
                # failure.
                barrier.check()
            barrier.fail(error)
            raise
        barrier.wait("commit", last=True, only=staged.owners)
        finalizer.committed = Committed(staged.save, staged.owners, staged.is_owner)
    except BaseException:
        staged.discard()
        raise
    finally:
        finalizer.close()
        staged.close()


def _open(target: Path, process: Process, barrier: StoreBarrier) -> _Staged:
    """The folder of this save, on every process."""
    with barrier.reporting():
        _demand_replaceable(target)
        staged = _make(target, secrets.token_hex(16)) if process.rank == 0 else None
        try:
            # After all processes have started, the others wait for the first without reporting again.
            only = (0,) if barrier.has_begun else None
            save = barrier.wait("open", "" if staged is None else staged.save, only=only)
            if staged is None:
                path = staged_path(target, save[:16])
                lock = FolderLock.share(path) if process.topology.is_local_main else None
                if lock is None and process.topology.is_local_main:
                    staged = _make(target, save)
                else:
                    staged = _Staged(path, lock, False, save, 0)
            staged.owners = json.loads(barrier.wait("enter", "made" if staged.is_owner else "", _who_made))
        except BaseException:
            if staged is not None:
                staged.discard()
            raise
    return staged


def _demand_replaceable(target: Path) -> None:
    """Raise if a folder cannot be replaced by another one of its name.

    Raises:
        CheckpointError: it is a mount point or the current working directory of this process, or its name is that of an
            incomplete save.
    """
    obstacle, remedy = "", f"Use a folder inside it, such as {target / 'checkpoint'}."
    if is_staged(target):
        obstacle = "Folders with such a name are those of saves that have not ended, and may be removed."
        remedy = "Use another name."
    elif os.path.ismount(target):
        obstacle = "It is a mount point. Saving renames a folder, and mount points cannot be renamed."
    elif target.is_dir() and Path(os.path.realpath(os.curdir)).is_relative_to(target):
        obstacle = (
            "It is the working directory of this process (os.getcwd()), and the checkpoint would replace the "
            "whole folder."
        )
    if obstacle:
        raise CheckpointError(f"Cannot save a checkpoint as {target}.", obstacle, remedy)


def _who_made(answers: Sequence[str]) -> str:
    return json.dumps([rank for rank, answer in enumerate(answers) if answer])


def _make(target: Path, save: str) -> _Staged:
    """A folder for a save, which this process owns."""
    try:
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(f"{target} is a file")
        _make_lasting(target.parent)
        recover(target.parent)
        left = [entry for entry in unfinished(target.parent) if entry.name.startswith(f"{target.name}.")]
        serial = 1 + max(map(serial_of, (target, *left)))
        path = staged_path(target, save[:16])
        lock = _created(path)
        if target.is_dir():
            _take_owner_and_mode(target, path)
    except OSError as error:
        raise CheckpointError(
            f"Cannot save a checkpoint as {target}.",
            f"{type(error).__name__}: {error}",
            "Use a folder in a place with write permission.",
        ) from error
    return _Staged(path, lock, True, save, serial)


def _created(path: Path) -> FolderLock:
    for _ in range(_MAX_ATTEMPTS):
        # While it is empty, whoever cleans up may take it.
        with suppress(FileNotFoundError):
            return FolderLock.create(path)
    return FolderLock.create(path)


def _take_owner_and_mode(old: Path, new: Path) -> None:
    """Give the new folder the same owner and permissions, as far as this user may."""
    take_owner(old, new)
    with suppress(OSError):
        new.chmod(stat.S_IMODE(old.stat().st_mode) | stat.S_IRWXU)


def _make_lasting(folder: Path) -> None:
    """Create a folder and its parents, and flush each, so that a power loss cannot remove them."""
    if folder.is_dir():
        return
    _make_lasting(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_path(folder.parent)


def _put_in_place(lock: FolderLock, target: Path, fsync: bool) -> None:
    """Give a committed folder its final name, and remove what it replaces.

    Another run may create a checkpoint of the same name in the meantime; the last one replaces it.
    """
    try:
        replaced = _placed(lock, target, fsync)
        if fsync:
            fsync_path(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"Cannot put a checkpoint in place as {target}.",
            f"{type(error).__name__}: {error}",
            "The previous folder is still valid.",
        ) from error
    if replaced is not None:
        retire(replaced, target, fsync=fsync)


def _placed(lock: FolderLock, target: Path, fsync: bool) -> Path | None:
    """Give a folder its final name; return the new path of the folder that had it."""
    for _ in range(_MAX_ATTEMPTS):
        if is_incomplete(target):
            remove(target)
        try:
            if not stands(target):
                lock.folder.rename(target)
                return None
            foreign = ForeignFiles(target, lock.folder, fsync=fsync)
            try:
                foreign.carry()
                replaced = _swapped(lock.folder, target, fsync)
            except OSError:
                if lock.is_at(lock.folder):
                    foreign.take_back()
                raise
            foreign.carry(replaced, target)
            return replaced
        except OSError as error:
            if lock.is_at(target):
                # A reader found the name missing, and gave it to this folder.
                return None
            if error.errno not in _CONTENTION_ERRNOS or not lock.is_at(lock.folder):
                raise
        time.sleep(_MAX_RETRY_PAUSE_S * random.random())
    raise FileExistsError(f"{target} was changed by another run {_MAX_ATTEMPTS} times in the meantime")


def _swapped(path: Path, target: Path, fsync: bool) -> Path:
    """Put a folder in the place of another one; return the new path of the other one."""
    if exchange(path, target):
        return path
    aside = staged_path(target, secrets.token_hex(8))
    try:
        target.rename(aside)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy_aside(target, aside, fsync)
    try:
        path.rename(target)
    except OSError:
        with suppress(OSError):
            aside.rename(target)
        raise
    return aside


def _copy_aside(target: Path, aside: Path, fsync: bool) -> None:
    """Move a folder by copying it; an overlay cannot rename folders of its lower layers.

    Raises:
        OSError: somebody uses the folder, or it cannot be copied.
    """
    manifest = target / MANIFEST_NAME
    with FolderLock.create(aside) as copy:
        shutil.copytree(target, aside, symlinks=True, dirs_exist_ok=True, ignore=_without_manifest)
        for path in (*walk(aside), *(entry for entry in aside.rglob("*") if entry.is_dir())) if fsync else ():
            if not path.is_symlink():
                fsync_path(path)
        copy.commit(manifest.read_text(encoding="utf-8") if manifest.exists() else "", fsync=fsync)
    if not manifest.exists():
        (aside / MANIFEST_NAME).unlink()
        FolderLock.mark(target).close()
    if not remove(target, by_user=True):
        raise OSError(errno.EBUSY, "another process uses the folder that must be replaced", str(target))


def _without_manifest(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == MANIFEST_NAME]


def exchange(first: Path, second: Path) -> bool:
    """Exchange two names atomically; return False, without a change, if the system or file system cannot."""
    call = _renameat2()
    if call is None:
        return False
    return bool(call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0)


@lru_cache(maxsize=1)
def _renameat2() -> Any | None:
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return call
