"""Flush and hash the files of a checkpoint in threads, while others are being written, and list them in a manifest."""

from __future__ import annotations

import errno
import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Final

from accel_plugins.checkpoint.files import fsync_path, walk
from accel_plugins.checkpoint.locks import PARTIAL_NAME, FolderLock
from accel_plugins.checkpoint.manifest import CheckpointManifest, FileRecord, record_of
from accel_state.errors import CheckpointError
from accel_state.settings.installed import installed_version

__all__ = ("CheckpointFinalizer", "Committed")

_LIBRARIES: Final = ("accel-plugins", "torch", "safetensors", "numpy")


@dataclass(frozen=True)
class _Stamp:
    """Values that change when a file is written again."""

    size: int
    changed: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> _Stamp:
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


@dataclass(frozen=True)
class Committed:
    """A checkpoint with its final name.

    Args:
        save: 32 hexadecimal digits, unique to this save; also a fact of its manifests.
        owners: ranks of the processes that created a folder, one for each group of nodes with a shared file system.
        is_owner: whether this process is one of them.
    """

    save: str
    owners: Sequence[int]
    is_owner: bool


class CheckpointFinalizer:
    """Flushes and hashes the files of a folder, and lists them in its manifest.

    Args:
        fsync: wait until everything is flushed to disk; False: do not flush the page cache.

    Attributes:
        committed: the checkpoint that `commit.staging` completed with this finalizer; None before.
    """

    def __init__(self, fsync: bool = True) -> None:
        self.committed: Committed | None = None
        self._fsync = fsync
        self._hashes = _Worker(record_of)
        # The file system commits the flushes of several threads together.
        self._flushes = _Worker(_flushed, threads=4)

    def begin(self, path: Path) -> None:
        """Hash and flush a complete file in the background, while the next one is written."""
        self._hashes.add(path)
        if self._fsync:
            self._flushes.add(path)

    def records(self, folder: Path) -> str:
        """Wait for hashing and flushing; return the results, for `adopt` on the process that finalizes.

        Raises:
            CheckpointError: reading or flushing a file failed.
        """
        try:
            paths = self._hashes.paths
            found = self._hashes.results(paths)
            self._flushes.results(paths)
        except OSError as error:
            raise _incomplete(folder, error) from error
        told = {}
        for path in paths:
            stamp, record = self._hashes.stamp(path), found[path]
            if stamp is not None:
                told[path.relative_to(folder).as_posix()] = [astuple(stamp), record.xxh3_128, record.ranges]
        return json.dumps(told)

    def adopt(self, folder: Path, told: Sequence[str]) -> str:
        """Use the processes' reports about files that have the same size and time here; needs no communication.

        Files that no process has hashed, or that changed later, are hashed here.
        """
        for text in filter(None, told):
            for name, (stamp, digest, ranges) in json.loads(text).items():
                path = folder / name
                with suppress(OSError):
                    if _Stamp(*stamp) == _Stamp.of(path):
                        ends = {int(end): part for end, part in ranges.items()}
                        self._hashes.know(path, _Stamp(*stamp), FileRecord(stamp[0], digest, ends))
                        self._flushes.know(path, _Stamp(*stamp), True)
        return ""

    def finalize(self, lock: FolderLock, facts: Mapping[str, Any] | None = None) -> CheckpointManifest:
        """Finish all files of a folder, and commit it with a manifest that lists them.

        Raises:
            CheckpointError: reading or flushing a file failed.
        """
        folder = lock.folder
        try:
            paths = [path for path in walk(folder) if path != folder / PARTIAL_NAME]
            for path in paths:
                if not path.is_file():
                    # A hook may have created a pipe, of which reading never ends, or a broken link.
                    raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))
                self._hashes.add(path)
                if self._fsync:
                    self._flushes.add(path)
            inner = {path.parent for path in paths} - {folder}
            for path in inner if self._fsync else ():
                self._flushes.add(path)
            found = self._hashes.results(paths)
            self._flushes.results([*paths, *inner])
            records: dict[str, FileRecord] = {path.relative_to(folder).as_posix(): found[path] for path in paths}
            versions = {name: version for name in _LIBRARIES if (version := installed_version(name)) is not None}
            manifest = CheckpointManifest(records, dict(facts or {}), versions, time.time())
            lock.commit(manifest.text(), fsync=self._fsync)
        except OSError as error:
            raise _incomplete(folder, error) from error
        finally:
            self.close()
        return manifest

    def close(self) -> None:
        """Stop without finalizing the folder."""
        self._hashes.close()
        self._flushes.close()


def _incomplete(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"Cannot complete the checkpoint in {folder}.",
        f"{type(error).__name__}: {error}",
        "Check the disk; older checkpoints are unchanged.",
    )


@dataclass
class _Worker:
    """Threads that apply a function to each path; a file that changes later is processed again.

    Python 3.12 and newer cannot start threads while the program ends; the saving thread then does the work itself.
    """

    work: Any
    threads: int = 1
    _waiting: queue.SimpleQueue[Path | None] = field(default_factory=queue.SimpleQueue)
    _asked: dict[Path, _Stamp] = field(default_factory=dict)
    _done: dict[Path, Any] = field(default_factory=dict)
    _started: list[threading.Thread] = field(default_factory=list)

    def add(self, path: Path) -> None:
        stamp = _Stamp.of(path)
        if self._asked.get(path) == stamp:
            return
        self._asked[path] = stamp
        if self._has_thread():
            self._waiting.put(path)
        else:
            self._do(path)

    def know(self, path: Path, stamp: _Stamp, found: Any) -> None:
        """Add the results of another process."""
        self._asked[path], self._done[path] = stamp, found

    @property
    def paths(self) -> list[Path]:
        """All submitted paths."""
        return list(self._asked)

    def stamp(self, path: Path) -> _Stamp | None:
        """The size and time of a file when it was last submitted."""
        return self._asked.get(path)

    def _has_thread(self) -> bool:
        """Start one more thread, up to the maximum; return False if there is no thread."""
        if len(self._started) < min(self.threads, len(self._asked)):
            thread = threading.Thread(target=self._run, name="accel-finalize", daemon=True)
            with suppress(RuntimeError):
                thread.start()
                self._started.append(thread)
        return bool(self._started)

    def _run(self) -> None:
        while (path := self._waiting.get()) is not None:
            self._do(path)

    def _do(self, path: Path) -> None:
        try:
            self._done[path] = self.work(path)
        except Exception as error:  # raised again in `results`
            self._done[path] = error

    def results(self, paths: list[Path]) -> dict[Path, Any]:
        """Wait for all paths and return the results.

        Raises:
            Exception: the first error of a thread.
        """
        self.close()
        for path in paths:
            if isinstance(self._done.get(path), Exception):
                raise self._done[path]
        return self._done

    def close(self) -> None:
        for _ in self._started:
            self._waiting.put(None)
        for thread in self._started:
            thread.join()
        self._started.clear()


def _flushed(path: Path) -> bool:
    fsync_path(path)
    return True
