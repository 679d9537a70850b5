"""The lock of a checkpoint folder: whoever uses a folder shares it, and whoever removes one needs it alone.

The lock is on the file of the manifest, from the moment at which the folder appears: while a checkpoint is written, the
file has the name `checkpoint_manifest.json.partial`; a rename makes it the manifest. The kernel frees the lock when a
process ends, in any container, so a free lock proves that nobody uses the folder. It needs no record, thread or clock.

Some file systems have no locks, or locks of one machine only. There a partial manifest names the kernel and the device
of its writer, and a free lock proves nothing on another machine. On Windows, where a folder with open files cannot be
renamed, nothing is locked.
"""

from __future__ import annotations

import errno
import json
import os
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from accel_plugins.checkpoint.files import MANIFEST_NAME, fsync_path

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

__all__ = ("PARTIAL_NAME", "FolderLock")

PARTIAL_NAME: Final = f"{MANIFEST_NAME}.partial"
"""The name of the manifest's file until the checkpoint is complete, and while it is being removed."""

_LOCAL_FILE_SYSTEMS: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs", "overlay", "zfs"})
"""Types of file systems that one kernel mounts, so that it knows of all locks."""
_MAX_OWNER_BYTES: Final = 4096
_GONE_ERRNOS: Final = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


class FolderLock:
    """An open checkpoint folder, and its lock; made by `create`, `share` and `seize`.

    Args:
        folder: the path at which it was opened.
        descriptor: the open folder; None on Windows.
        file: the open file of its manifest; None on Windows.
        is_locked: whether the file system has locks.
    """

    def __init__(self, folder: Path, descriptor: int | None, file: int | None, is_locked: bool) -> None:
        self.folder, self.is_locked = folder, is_locked
        self._descriptor, self._file = descriptor, file
        _open_locks.add(self)

    @classmethod
    def create(cls, folder: Path) -> FolderLock:
        """Create a folder with a partial manifest, and share its lock.

        Raises:
            FileNotFoundError: another process removed the folder while it was empty.
            OSError: the folder cannot be created.
        """
        folder.mkdir()
        try:
            return cls.mark(folder)
        except OSError:
            with suppress(OSError):
                folder.rmdir()
            raise

    @classmethod
    def mark(cls, folder: Path) -> FolderLock:
        """Give a folder a partial manifest, and share its lock.

        Raises:
            FileExistsError: it has one.
            OSError: there is no such folder, or nothing can be written there.
        """
        file = os.open(folder / PARTIAL_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        descriptor = None
        try:
            is_locked = _lock(file, alone=False) is True
            _write(file, json.dumps(_writer(file)).encode())
            if fcntl is None:
                os.close(file)
                return cls(folder, None, None, False)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            return cls(folder, descriptor, file, is_locked)
        except OSError:
            os.close(file)
            raise

    @classmethod
    def share(cls, folder: Path) -> FolderLock | None:
        """Open a folder and share its lock; None if it has no manifest, also no partial one, or is being removed."""
        while True:
            opened = cls._open(folder, alone=False)
            if opened is None or opened.is_at(folder):
                return opened
            opened.close()

    @classmethod
    def seize(cls, folder: Path, *, by_user: bool = False) -> FolderLock | None:
        """Open a folder for its removal; None if it is in use.

        Args:
            folder: the folder.
            by_user: a user named it; otherwise an incomplete one must be provably abandoned.
        """
        opened = cls._open(folder, alone=True)
        if opened is None:
            return None
        if opened.is_at(folder) and (
            by_user or opened.is_committed or (opened.is_locked and opened._knows_all_users())
        ):
            return opened
        opened.close()
        return None

    @classmethod
    def _open(cls, folder: Path, alone: bool) -> FolderLock | None:
        if fcntl is None:
            is_checkpoint = any((folder / name).is_file() for name in (MANIFEST_NAME, PARTIAL_NAME))
            return cls(folder, None, None, False) if is_checkpoint else None
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            if error.errno in _GONE_ERRNOS:
                return None
            raise
        try:
            # The manifest may get its name between two attempts.
            for name in (MANIFEST_NAME, PARTIAL_NAME, MANIFEST_NAME):
                file = _open_if_there(name, descriptor)
                if file is None:
                    continue
                locked = _lock(file, alone)
                if locked is not False and os.fstat(file).st_nlink:
                    return cls(folder, descriptor, file, locked is True)
                os.close(file)
                break
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    @property
    def path(self) -> Path:
        """A path to the open folder, whatever name it has by now; on systems without one, its first path."""
        path = Path(f"/proc/self/fd/{self._descriptor}")
        return path if path.is_dir() else self.folder

    @property
    def descriptor(self) -> int | None:
        """The open folder; None on Windows."""
        return self._descriptor

    @property
    def is_committed(self) -> bool:
        """Whether the folder has a manifest."""
        if self._file is None:
            return (self.folder / MANIFEST_NAME).is_file()
        with suppress(OSError):
            named = os.stat(MANIFEST_NAME, dir_fd=self._descriptor, follow_symlinks=False)
            return os.path.samestat(named, os.fstat(self._file))
        return False

    def is_at(self, path: Path) -> bool:
        """Whether a path leads to this folder."""
        try:
            own = os.stat(self.folder) if self._descriptor is None else os.fstat(self._descriptor)
            return os.path.samestat(os.stat(path), own)
        except OSError:
            return False

    def commit(self, text: str, *, fsync: bool) -> None:
        """Write the manifest into its file, and give it its name: from now on the checkpoint exists."""
        if self._file is None:
            (self.folder / PARTIAL_NAME).write_text(text, encoding="utf-8")
        else:
            _write(self._file, text.encode())
            if fsync:
                os.fsync(self._file)
        self._rename(PARTIAL_NAME, MANIFEST_NAME)
        if fsync:
            self._flush()

    def uncommit(self) -> None:
        """Take the manifest's name away: from now on there is no checkpoint."""
        if self.is_committed:
            self._rename(MANIFEST_NAME, PARTIAL_NAME)
            self._flush()

    def _rename(self, old: str, new: str) -> None:
        if self._descriptor is None:
            os.replace(self.folder / old, self.folder / new)
        else:
            os.rename(old, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def _flush(self) -> None:
        if self._descriptor is None:
            fsync_path(self.folder)
        else:
            # Some file systems cannot flush a folder.
            with suppress(OSError):
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Give the lock back."""
        _open_locks.discard(self)
        for opened in (self._file, self._descriptor):
            if opened is not None:
                os.close(opened)
        self._file = self._descriptor = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _knows_all_users(self) -> bool:
        """Whether all users of a partial folder are on this machine, which then knows their locks."""
        if _type_of_file_system(self.folder) in _LOCAL_FILE_SYSTEMS:
            return True
        try:
            assert self._file is not None
            return bool(json.loads(os.pread(self._file, _MAX_OWNER_BYTES, 0)) == _writer(self._file))
        except (OSError, ValueError, RecursionError):
            return False


_open_locks: Final[weakref.WeakSet[FolderLock]] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked process shares its parent's locks, and must not hold them after the parent's death."""
    for lock in tuple(_open_locks):
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _open_if_there(name: str, descriptor: int) -> int | None:
    flags = os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        # Network file systems lock a file alone only for a process that may write it.
        return os.open(name, os.O_RDWR | flags, dir_fd=descriptor)
    except OSError as error:
        if error.errno in _GONE_ERRNOS:
            return None
    return os.open(name, os.O_RDONLY | flags, dir_fd=descriptor)


def _write(file: int, content: bytes) -> None:
    os.lseek(file, 0, os.SEEK_SET)
    os.ftruncate(file, 0)
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


def _lock(file: int, alone: bool) -> bool | None:
    """Lock an open file without waiting; False: another process has the lock, None: there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _writer(file: int) -> dict[str, Any]:
    """The kernel that runs this process, and its number of the file's device."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"boot": boot, "device": os.fstat(file).st_dev}


def _type_of_file_system(folder: Path) -> str:
    """The type of the file system that has a folder; empty if the system does not tell."""
    real, nearest, kind = os.path.realpath(folder), "", ""
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            mount, _, described = line.partition(" - ")
            point = mount.split()[4].replace("\\040", " ")
            if len(point) >= len(nearest) and (real == point or real.startswith(point.rstrip("/") + "/")):
                nearest, kind = point, described.split()[0]
    return kind
