"""Make a folder valid atomically: write it under another name, flush it to disk, and rename it.

A previous folder of this name is valid until the rename. If the system can exchange two names atomically, it does. On
other systems the old folder is first moved aside; if the process dies before the rename, the next reader restores it.
Every file is hashed and flushed, and the manifest with the list of files is written last. A thread flushes files while
others are hashed from the page cache; it starts with the first file while others are being written.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import queue
import random
import shutil
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import xxhash

from accel_ops.agreement import StoreBarrier
from accel_plugins.checkpoint.files import MANIFEST_NAME, fsync_path, is_ours, shards_of, walk
from accel_plugins.checkpoint.manifest import CheckpointManifest, FileRecord, read_manifest, record_of
from accel_plugins.checkpoint.recovery import Claim, discard, fingerprint, recover
from accel_state.errors import CheckpointError
from accel_state.settings.installed import installed_version

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = (
    "CheckpointFinalizer",
    "exchange",
    "staging",
)

logger = logging.getLogger(__name__)

_ATTEMPTS: Final = 100
_LONGEST_PAUSE: Final = 0.02
_CONTENDED: Final = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY)
"""Errors that occur when another run creates or removes a checkpoint of the same name."""

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2

_LIBRARIES: Final = ("accel-plugins", "torch", "safetensors", "numpy")


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
    asked, remedy = f"Cannot save a checkpoint as {target}.", "Older checkpoints are unchanged."
    if barrier is None:
        barrier = StoreBarrier(process, f"save/{target.name}", asked, deadline, CheckpointError, remedy)
    barrier.describe(asked, remedy)
    path, claim, owners = _open(target, process, barrier)
    try:
        try:
            yield path
            for shard in shards_of(path, process.rank):
                finalizer.begin(shard)
            records = finalizer.records(path) if process.rank else ""
            barrier.wait("write", records, partial(finalizer.adopt, path))
            if claim is not None:
                finalizer.finalize(path, {"world_size": process.world_size, **(facts or {})})
            if owners != [0]:
                barrier.wait("complete", only=owners)
            if claim is not None:
                _put_in_place(claim, target, finalizer, fsync)
        except BaseException as error:
            if isinstance(error, (OSError, CheckpointError)):
                # A process that fails takes the folder away under the hands of the others; theirs is then not the first
                # failure.
                barrier.check()
            barrier.fail(error)
            raise
        identity = barrier.wait("commit", finalizer.identity, last=True, only=owners)
        finalizer.committed = Committed(identity, owners, claim is not None)
    finally:
        finalizer.close()
        _leave(claim)


def _open(target: Path, process: Process, barrier: StoreBarrier) -> tuple[Path, Claim | None, list[int]]:
    """The staging folder, the claim of a process that created one, and the ranks of all such processes."""
    with barrier.reporting():
        _demand_replaceable(target)
        claim = _make(target) if process.rank == 0 else None
        try:
            # After all processes have started, the others wait for the first without reporting again.
            token = barrier.wait("open", "" if claim is None else claim.token, only=(0,) if barrier.has_begun else None)
            path = target.with_name(f"{target.name}.tmp-{token}")
            if process.topology.is_local_main and not path.exists():
                claim = _make(target, token)
            owners = json.loads(barrier.wait("enter", "" if claim is None else "made", _who_made))
        except BaseException:
            _leave(claim)
            raise
    return path, claim, owners


def _demand_replaceable(target: Path) -> None:
    """Raise if a folder cannot be replaced by another one of its name.

    Raises:
        CheckpointError: it is a mount point or the current working directory of this process.
    """
    obstacle = ""
    if os.path.ismount(target):
        obstacle = "It is a mount point. Saving renames a folder, and mount points cannot be renamed."
    elif target.is_dir() and Path(os.path.realpath(os.curdir)).is_relative_to(target):
        obstacle = (
            "It is the working directory of this process (os.getcwd()), and the checkpoint would replace the "
            "whole folder."
        )
    if obstacle:
        remedy = f"Use a folder inside it, such as {target / 'checkpoint'}."
        raise CheckpointError(f"Cannot save a checkpoint as {target}.", obstacle, remedy)


def _who_made(answers: Sequence[str]) -> str:
    return json.dumps([rank for rank, answer in enumerate(answers) if answer])


def _leave(claim: Claim | None) -> None:
    """Remove the temporary folder of a failed save, or the replaced folder."""
    if claim is not None:
        discard(claim.path("tmp"))
        claim.release()


def _make(target: Path, token: str | None = None) -> Claim:
    """A staging folder, claimed by this process."""
    try:
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(f"{target} is a file")
        _make_lasting(target.parent)
        recover(target.parent)
        claim = Claim(target, token)
        try:
            claim.path("tmp").mkdir()
            if target.is_dir():
                _take_mode(target, claim.path("tmp"))
        except OSError:
            claim.release()
            raise
    except OSError as error:
        raise CheckpointError(
            f"Cannot save a checkpoint as {target}.",
            f"{type(error).__name__}: {error}",
            "Use a folder in a place with write permission.",
        ) from error
    return claim


def _take_mode(old: Path, new: Path) -> None:
    """Give the new folder the same owner and permissions, if the file system supports them."""
    with suppress(PermissionError):
        new.chmod(stat.S_IMODE(old.stat().st_mode) | stat.S_IRWXU)


def _make_lasting(folder: Path) -> None:
    """Create a folder and its parents, and flush each, so that a power loss cannot remove them."""
    if folder.is_dir():
        return
    _make_lasting(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_path(folder.parent)


def _put_in_place(claim: Claim, target: Path, finalizer: CheckpointFinalizer, fsync: bool) -> None:
    """Rename the staging folder to its final name.

    Another run may create a checkpoint of the same name in the meantime; the last one replaces it.
    """
    path, attempts = claim.path("tmp"), _ATTEMPTS
    try:
        while not _is_placed(claim, path, target, finalizer):
            attempts -= 1
            if not attempts:
                raise FileExistsError(f"{target} was changed by another run {_ATTEMPTS} times in the meantime")
            time.sleep(_LONGEST_PAUSE * random.random())
        if fsync:
            fsync_path(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"Cannot put a checkpoint in place as {target}.",
            f"{type(error).__name__}: {error}",
            "The previous folder is still valid.",
        ) from error


def _is_placed(claim: Claim, path: Path, target: Path, finalizer: CheckpointFinalizer) -> bool:
    """Try to rename a folder; return False when another run changed the target in the meantime."""
    carried: list[Path] = []
    try:
        if target.exists():
            before = fingerprint(target)
            _carry_over(target, path, carried)
            if fingerprint(target) != before:
                raise FileExistsError(errno.EEXIST, "another run changed it in the meantime", str(target))
        _check_ours(claim, path, target, finalizer)
        if exchange(path, target):
            _carry_late(path, target, carried)
            return True
        _move_in(path, target, claim.path("old"), carried)
    except OSError as error:
        for entry in carried:
            _remove(entry)
        if error.errno in _CONTENDED and path.is_dir():
            return False
        raise
    return True


def _check_ours(claim: Claim, path: Path, target: Path, finalizer: CheckpointFinalizer) -> None:
    """Raise if another process removed the folder as abandoned, or changed it after it was finalized."""
    changed = [] if claim.holds else ["Another run removed its temporary folder as abandoned."]
    changed += [
        f"{name} is missing, or its content was changed after it was written." for name in finalizer.changed(path)
    ]
    if changed:
        raise CheckpointError(
            f"Cannot put a checkpoint in place as {target}.",
            " ".join(changed),
            "The previous folder is still valid. Make sure that no other program writes there, and save again.",
        )


def _move_in(path: Path, target: Path, aside: Path, carried: list[Path]) -> None:
    """Replace a folder by another without an atomic exchange; `located` finds the old one in between."""
    try:
        target.rename(aside)
    except FileNotFoundError:
        path.rename(target)
        return
    try:
        path.rename(target)
    except OSError:
        with suppress(OSError):
            aside.rename(target)
        if os.path.lexists(target):
            # Another run created a newer one there, or the old one is already restored.
            discard(aside)
        raise
    _carry_late(aside, target, carried)
    discard(aside)


def _carry_late(old: Path, new: Path, carried: list[Path]) -> None:
    """Copy files that others wrote into the old folder after the first copy and before the rename."""
    try:
        _carry_over(old, new, [new / entry.name for entry in carried])
    except OSError as error:
        logger.warning("A file that was written while %s was replaced may be lost: %s", new, error)


def _carry_over(old: Path, new: Path, carried: list[Path]) -> None:
    """Copy files of the old folder that saving did not write.

    Args:
        old: the folder.
        new: the folder that replaces it.
        carried: receives the list of copies, also after an error; files in it are copied again if they changed.
    """
    try:
        manifest = read_manifest(old)
    except CheckpointError:
        manifest = None
    written = {name.partition("/")[0] for name in (manifest.files if manifest else ())}
    for entry in sorted(old.iterdir()):
        to = new / entry.name
        if entry.name in written or is_ours(entry.name) or (os.path.lexists(to) and to not in carried):
            continue
        carried.append(to)
        _bring(entry, to)


def _bring(entry: Path, to: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        if os.path.ismount(entry):
            # The old folder is removed later, including the files of a mounted file system.
            raise OSError(errno.EBUSY, "a file system is mounted inside the folder that must be replaced", str(entry))
        to.mkdir(exist_ok=True)
        for inner in sorted(entry.iterdir()):
            _bring(inner, to / inner.name)
        shutil.copystat(entry, to)
    elif not os.path.lexists(to):
        _link(entry, to)
    elif entry.lstat().st_mtime_ns > to.lstat().st_mtime_ns:
        to.unlink()
        _link(entry, to)


def _link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """A hard link, so that a process with the file open still writes into it; a copy if links are not supported."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


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
        identity: identity of the first process's folder, see `CheckpointFinalizer.identity`.
        owners: ranks of the processes that created a folder, one for each group of nodes with a shared file system.
        is_owner: whether this process is one of them.
    """

    identity: str
    owners: Sequence[int]
    is_owner: bool


class CheckpointFinalizer:
    """Flushes and hashes the files of a folder, and lists them.

    Args:
        fsync: wait until everything is flushed to disk; False: do not flush the page cache.

    Attributes:
        committed: the checkpoint that `staging` completed with this finalizer; None before.
    """

    def __init__(self, fsync: bool = True) -> None:
        self._fsync = fsync
        self._hashes = _Worker(record_of)
        # The file system commits the flushes of several threads together.
        self._flushes = _Worker(_flushed, threads=4)
        self._finalized: CheckpointManifest | None = None
        self.committed: Committed | None = None

    @property
    def identity(self) -> str:
        """The hash of the finalized folder's manifest: 32 hexadecimal digits, unique to this save."""
        return "" if self._finalized is None else xxhash.xxh3_128_hexdigest(self._finalized.text().encode())

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

    def finalize(self, folder: Path, facts: Mapping[str, Any] | None = None) -> CheckpointManifest:
        """Finish all files of a folder, and write its manifest.

        Raises:
            CheckpointError: reading or flushing a file failed.
        """
        try:
            paths = [path for path in walk(folder) if path.name != MANIFEST_NAME or path.parent != folder]
            for path in paths:
                if not path.is_file():
                    # A hook may have created a pipe, of which reading never ends, or a broken link.
                    raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))
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
            raise _incomplete(folder, error) from error
        finally:
            self.close()
        self._finalized = manifest
        return manifest

    def changed(self, folder: Path) -> list[str]:
        """Names of files in a finalized folder that have changed since."""
        if self._finalized is None:
            return []
        records = self._finalized.files.items()
        changed = [name for name, record in records if not self._is_still(folder / name, record)]
        try:
            whole = (folder / MANIFEST_NAME).read_text(encoding="utf-8") == self._finalized.text()
        except (OSError, UnicodeDecodeError):
            whole = False
        return changed if whole else [*changed, MANIFEST_NAME]

    def _is_still(self, path: Path, record: FileRecord) -> bool:
        """Whether a file is the hashed one; some network file systems change the time of unchanged files."""
        try:
            return self._hashes.stamp(path) == _Stamp.of(path) or record_of(path).xxh3_128 == record.xxh3_128
        except OSError:
            return False

    def _write(self, folder: Path, manifest: CheckpointManifest, directories: set[Path]) -> None:
        target = folder / MANIFEST_NAME
        target.write_text(manifest.text(), encoding="utf-8")
        if self._fsync:
            for path in (target, *directories):
                self._flushes.add(path)
            self._flushes.results([target, *directories])

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
