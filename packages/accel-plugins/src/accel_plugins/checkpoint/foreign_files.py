"""Files in a checkpoint folder that no save wrote: they stay when the folder is replaced."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from accel_plugins.checkpoint.files import MANIFEST_NAME, fsync_path
from accel_plugins.checkpoint.locks import PARTIAL_NAME
from accel_plugins.checkpoint.manifest import read_manifest
from accel_state.errors import CheckpointError

__all__ = ("ForeignFiles", "take_owner")


class ForeignFiles:
    """Carries foreign files from a folder into the one that replaces it.

    What a save wrote is what the manifest of the old folder lists, or what the new folder has under the same name.

    Args:
        old: the folder.
        new: the folder that replaces it.
        fsync: flush what is carried, at every level.
    """

    def __init__(self, old: Path, new: Path, *, fsync: bool) -> None:
        self._old, self._new, self._fsync = old, new, fsync
        try:
            manifest = read_manifest(old)
        except CheckpointError:
            manifest = None
        self._written = {MANIFEST_NAME, PARTIAL_NAME, *(manifest.files if manifest is not None else ())}
        self._carried: set[str] = set()

    def carry(self, old: Path | None = None, new: Path | None = None) -> None:
        """Carry what is not there yet, and what changed since the last call; again with other names of the folders.

        Raises:
            OSError: a file cannot be carried, or a file system is mounted in the folder.
        """
        self._old, self._new = old or self._old, new or self._new
        changed = set[Path]()
        for name in self._foreign(""):
            source, target = self._old / name, self._new / name
            if os.path.lexists(target):
                # Whoever carried this file brings its newer version; everything else there belongs to the new save.
                if name not in self._carried or source.lstat().st_mtime_ns <= target.lstat().st_mtime_ns:
                    continue
                target.unlink()
            changed |= self._with_folders(target.parent)
            _link(source, target, self._fsync)
            changed.add(target.parent)
            self._carried.add(name)
        if self._fsync:
            for folder in sorted(changed, reverse=True):
                fsync_path(folder)

    def take_back(self) -> None:
        """Remove what was carried from a new folder that does not replace the old one."""
        for name in self._carried:
            (self._new / name).unlink(missing_ok=True)
        self._carried.clear()

    def _foreign(self, below: str) -> Iterator[str]:
        for entry in sorted(os.scandir(self._old / below), key=lambda entry: entry.name):
            name = f"{below}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if os.path.ismount(entry.path):
                    # The old folder is removed later, including the files of a mounted file system.
                    obstacle = "a file system is mounted inside the folder that must be replaced"
                    raise OSError(errno.EBUSY, obstacle, entry.path)
                yield from self._foreign(f"{name}/")
            elif name not in self._written:
                yield name

    def _with_folders(self, folder: Path) -> set[Path]:
        """Create the folders of a carried file, with the modes of the old ones; return what got an entry."""
        if os.path.isdir(folder):
            return set()
        changed = self._with_folders(folder.parent)
        folder.mkdir(exist_ok=True)
        take_owner(self._old / folder.relative_to(self._new), folder)
        with suppress(OSError):
            shutil.copystat(self._old / folder.relative_to(self._new), folder)
        return changed | {folder.parent}


def take_owner(old: Path, new: Path) -> None:
    """Give a file or folder the owner and the group of another one, as far as this user may."""
    with suppress(OSError, AttributeError):
        status = old.lstat()
        os.chown(new, status.st_uid, status.st_gid, follow_symlinks=False)


def _link(source: Path, target: Path, fsync: bool) -> None:
    """A hard link, so that a process with the file open still writes into it; a copy if links are not supported."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
        take_owner(source, target)
        if fsync and not target.is_symlink():
            fsync_path(target)
