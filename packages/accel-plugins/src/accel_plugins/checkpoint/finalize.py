"""Flush and hash the files of a checkpoint in threads, while others are being written, and list them in a manifest."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

from accel_plugins.checkpoint.files import fsync_path, walk
from accel_plugins.checkpoint.locks import PARTIAL_NAME, FolderLock
from accel_plugins.checkpoint.manifest import CheckpointManifest, FileRecord, record_of
from accel_state.errors import CheckpointError
from accel_state.settings.installed import installed_version

__all__ = ("CheckpointFinalizer", "Committed")

_RECORDED_LIBRARIES: Final = ("accel-plugins", "torch", "safetensors", "numpy")


@dataclass(frozen=True)
class _Stamp:
    """Values that change when a file is written again."""

    size: int
    changed: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> _Stamp:
        status = path.stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


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
            hashed = self._hashes.results()
            self._flushes.results()
        except OSError as error:
            raise _incomplete(folder, error) from error
        names = {path.relative_to(folder).as_posix(): result for path, result in hashed.items()}
        return json.dumps({name: [astuple(stamp), record.xxh3_128] for name, (stamp, record) in names.items()})

    def adopt(self, folder: Path, reports: Sequence[str]) -> str:
        """Use the processes' reports about files that have the same size and time here; needs no communication.

        Files that no process has hashed, or that changed later, are hashed here.
        """
        for text in filter(None, reports):
            for name, (stamp, digest) in json.loads(text).items():
                path = folder / name
                with suppress(OSError):
                    if _Stamp(*stamp) == _Stamp.of(path):
                        self._hashes.know(path, _Stamp(*stamp), FileRecord(stamp[0], digest))
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
            hashed = self._hashes.results(paths)
            self._flushes.results([*paths, *inner])
            records: dict[str, FileRecord] = {path.relative_to(folder).as_posix(): hashed[path][1] for path in paths}
            versions = {
                name: version for name in _RECORDED_LIBRARIES if (version := installed_version(name)) is not None
            }
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


class _Worker:
    """Threads that apply a function to each path; a file that changes later is processed again.

    Args:
        work: the function.
        threads: maximum number of threads.
    """

    def __init__(self, work: Callable[[Path], Any], threads: int = 1) -> None:
        self._work, self._pool = work, ThreadPoolExecutor(threads, "accel-finalize")
        self._jobs: dict[Path, tuple[_Stamp, Future[Any]]] = {}

    def add(self, path: Path) -> None:
        stamp = _Stamp.of(path)
        if path not in self._jobs or self._jobs[path][0] != stamp:
            self._jobs[path] = stamp, self._started(path)

    def _started(self, path: Path) -> Future[Any]:
        try:
            return self._pool.submit(self._work, path)
        except RuntimeError:
            # Python 3.12 and newer cannot start threads while the program ends.
            job = Future[Any]()
            try:
                job.set_result(self._work(path))
            except Exception as error:
                job.set_exception(error)
            return job

    def know(self, path: Path, stamp: _Stamp, result: Any) -> None:
        """Add a result of another process."""
        job = Future[Any]()
        job.set_result(result)
        self._jobs[path] = stamp, job

    def results(self, paths: Iterable[Path] | None = None) -> dict[Path, tuple[_Stamp, Any]]:
        """Wait for some paths, or all; return the size and time of each when it was submitted, and the result.

        Raises:
            Exception: the first error of the function.
        """
        jobs = self._jobs if paths is None else {path: self._jobs[path] for path in paths if path in self._jobs}
        return {path: (stamp, job.result()) for path, (stamp, job) in jobs.items()}

    def close(self) -> None:
        self._pool.shutdown()


def _flushed(path: Path) -> bool:
    fsync_path(path)
    return True
