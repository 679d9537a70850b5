"""Completing a folder: every file is hashed and made durable, and the manifest that lists them is written last.

A thread waits for the disk while files are hashed from the page cache, and begins with the first file while others are
still being written.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_plugins.checkpoint.manifest import CheckpointManifest, FileRecord, record_of, walk
from accel_state.errors import CheckpointError
from accel_state.settings.installed import installed_version

__all__ = ("Sealer", "fsync_path")

_LIBRARIES: Final = ("accel-plugins", "torch", "safetensors", "numpy")


@dataclass(frozen=True)
class _Stamp:
    """What changes when a file is written again."""

    size: int
    changed: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> _Stamp:
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


class Sealer:
    """Makes the files of one folder durable and lists them.

    Args:
        fsync: wait until the disk holds everything; False trusts the page cache.
    """

    def __init__(self, fsync: bool = True) -> None:
        self._fsync = fsync
        self._hashes = _Worker(record_of)
        self._flushes = _Worker(_flushed)
        self._sealed: CheckpointManifest | None = None

    def begin(self, path: Path) -> None:
        """Hash and flush a file that is complete, behind the back of whoever writes the next one."""
        self._hashes.add(path)
        if self._fsync:
            self._flushes.add(path)

    def seal(self, folder: Path, facts: Mapping[str, Any] | None = None) -> CheckpointManifest:
        """Finish all files of a folder, and write its manifest.

        Raises:
            CheckpointError: the disk refuses.
        """
        try:
            paths = [path for path in walk(folder) if path.name != MANIFEST_NAME or path.parent != folder]
            for path in paths:
                self._hashes.add(path)
                if self._fsync:
                    self._flushes.add(path)
            found = self._hashes.results(paths)
            if self._fsync:
                self._flushes.results(paths)
            records: dict[str, FileRecord] = {path.relative_to(folder).as_posix(): found[path] for path in paths}
            versions = {name: version for name in _LIBRARIES if (version := installed_version(name)) is not None}
            manifest = CheckpointManifest(records, dict(facts or {}), versions, time.time())
            self._write(folder, manifest, {path.parent for path in paths} | {folder})
        except OSError as error:
            raise CheckpointError(
                f"Cannot complete the checkpoint in {folder}.",
                f"{type(error).__name__}: {error}",
                "Check the disk; older checkpoints are untouched.",
            ) from error
        finally:
            self.close()
        self._sealed = manifest
        return manifest

    def changed(self, folder: Path) -> list[str]:
        """Names of files in a sealed folder that are no longer what was sealed."""
        if self._sealed is None:
            return []
        records = self._sealed.files.items()
        changed = [name for name, record in records if not self._is_still(folder / name, record)]
        try:
            whole = (folder / MANIFEST_NAME).read_text(encoding="utf-8") == self._sealed.text()
        except (OSError, UnicodeDecodeError):
            whole = False
        return changed if whole else [*changed, MANIFEST_NAME]

    def _is_still(self, path: Path, record: FileRecord) -> bool:
        """Whether a file is the one that was hashed; some network file systems change the time of one that is."""
        try:
            return self._hashes.stamp(path) == _Stamp.of(path) or record_of(path).xxh3_128 == record.xxh3_128
        except OSError:
            return False

    def _write(self, folder: Path, manifest: CheckpointManifest, directories: set[Path]) -> None:
        target = folder / MANIFEST_NAME
        target.write_text(manifest.text(), encoding="utf-8")
        if self._fsync:
            fsync_path(target)
            for directory in sorted(directories, reverse=True):
                fsync_path(directory)

    def close(self) -> None:
        """Stop; for a folder that will not be sealed."""
        self._hashes.close()
        self._flushes.close()


@dataclass
class _Worker:
    """A thread that does one thing with each path it is given; a file that changed afterwards is done again.

    From Python 3.12 on no thread can be started while the program ends; the one that saves then does the work itself.
    """

    work: Any
    _waiting: queue.SimpleQueue[Path | None] = field(default_factory=queue.SimpleQueue)
    _asked: dict[Path, _Stamp] = field(default_factory=dict)
    _done: dict[Path, Any] = field(default_factory=dict)
    _thread: threading.Thread | None = None

    def add(self, path: Path) -> None:
        stamp = _Stamp.of(path)
        if self._asked.get(path) == stamp:
            return
        self._asked[path] = stamp
        if self._thread is not None or self._has_started():
            self._waiting.put(path)
        else:
            self._do(path)

    def stamp(self, path: Path) -> _Stamp | None:
        """What a file looked like when it was handed over last."""
        return self._asked.get(path)

    def _has_started(self) -> bool:
        thread = threading.Thread(target=self._run, name="accel-seal", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while (path := self._waiting.get()) is not None:
            self._do(path)

    def _do(self, path: Path) -> None:
        try:
            self._done[path] = self.work(path)
        except Exception as error:  # raised again in `results`
            self._done[path] = error

    def results(self, paths: list[Path]) -> dict[Path, Any]:
        """What was found, once everything is done.

        Raises:
            Exception: the first that was met.
        """
        self.close()
        for path in paths:
            if isinstance(self._done.get(path), Exception):
                raise self._done[path]
        return self._done

    def close(self) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None


def _flushed(path: Path) -> bool:
    fsync_path(path)
    return True


def fsync_path(path: Path) -> None:
    """Wait until the disk holds a file or the entries of a folder; systems that cannot open folders skip those."""
    try:
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() or os.name != "nt" else os.O_RDWR)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
