"""Making a folder valid all at once: it is filled under another name, made durable, and put in place by a rename.

What stood under the name before stays valid until that moment. Where the system can exchange two names in one step, it
does; elsewhere the old folder is moved aside, and `recover` puts it back should the process die in between.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accel_plugins.checkpoint.files import is_ours
from accel_plugins.checkpoint.manifest import read_manifest
from accel_plugins.checkpoint.meeting import Meeting
from accel_plugins.checkpoint.sealing import Sealer, fsync_path
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("beside", "discard", "exchange", "left_behind", "recover", "staging", "unfinished")

_STAGED: Final = re.compile(r"(?P<name>.+)\.(?P<kind>tmp|old)-(?P<host>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}")
_FORGOTTEN: Final = 24 * 3600.0
"""Seconds after which a staging folder counts as left behind where its process cannot be looked for."""

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


@contextmanager
def staging(
    target: str | os.PathLike[str],
    process: Process | None = None,
    *,
    facts: Mapping[str, Any] | None = None,
    fsync: bool = True,
    deadline: float = 600.0,
    sealer: Sealer | None = None,
) -> Iterator[Path]:
    """A folder to write a checkpoint into; it takes the name `target` when the block ends without an error.

    Called on every process of the run. Processes of a node that does not see the first process's disk write into a
    folder of their own node, which becomes a checkpoint of its own there.

    Args:
        target: what the checkpoint will be called; what stands there before stays valid until the new one is complete,
            and files there that saving did not write are carried over.
        process: who this process is; the current one when None.
        facts: goes into the manifest.
        fsync: wait until the disk holds everything.
        deadline: seconds that processes wait for each other.
        sealer: what has begun to flush files while others are still being written.

    Raises:
        CheckpointError: this or another process failed; nothing that was there before is touched.
    """
    if process is None:
        from accel_state import current

        process = current.process_or_start()
    target = Path(os.path.realpath(target))
    sealer = sealer or Sealer(fsync)
    meeting = Meeting(process, f"save/{target.name}", f"A checkpoint was to be saved as {target}.", deadline)
    path, owns = _open(target, process, meeting)
    phase = "write"
    try:
        try:
            yield path
            meeting.exchange(phase)
            phase = "complete"
            if owns:
                sealer.seal(path, {"world_size": process.world_size, **(facts or {})})
            meeting.exchange(phase)
            phase = "commit"
            if owns:
                _put_in_place(path, target, fsync)
        except BaseException as error:
            # A process that fails takes the folder away under the hands of the others: theirs is not the first failure.
            first = _failure_of_another(meeting, phase) if isinstance(error, (OSError, CheckpointError)) else None
            meeting.fail(phase, f"{type(error).__name__}: {error}")
            if first is not None:
                raise first from error
            raise
        meeting.exchange(phase)
        meeting.leave()
    finally:
        sealer.close()
        if owns:
            discard(path)


def _failure_of_another(meeting: Meeting, phase: str) -> CheckpointError | None:
    try:
        meeting.look_for_failures(phase)
    except CheckpointError as first:
        return first
    return None


def _open(target: Path, process: Process, meeting: Meeting) -> tuple[Path, bool]:
    """The staging folder, and whether this process made it and has to put it in place."""
    owns = process.rank == 0
    path = beside(target, "tmp")
    if owns:
        _make(path, target, meeting, "open")
    try:
        path = path.with_name(meeting.exchange("open", path.name)[0])
        if process.topology.is_local_main and not path.exists():
            owns = True
            _make(path, target, meeting, "enter")
        meeting.exchange("enter")
    except BaseException:
        if owns:
            discard(path)
        raise
    return path, owns


def beside(target: Path, kind: str) -> Path:
    """A name next to `target` for something that is on its way in ("tmp") or out ("old"); `recover` knows it."""
    return target.with_name(f"{target.name}.{kind}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}")


@lru_cache(maxsize=1)
def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _make(path: Path, target: Path, meeting: Meeting, phase: str) -> None:
    try:
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(f"{target} is a file")
        _make_lasting(path.parent)
        recover(path.parent)
        path.mkdir()
    except OSError as error:
        meeting.fail(phase, f"{type(error).__name__}: {error}")
        raise CheckpointError(
            f"A checkpoint was to be saved as {target}.",
            f"{type(error).__name__}: {error}",
            "Name a folder in a place where you may write.",
        ) from error


def _make_lasting(folder: Path) -> None:
    """Create a folder and those above it, each known to the disk: what is saved in it must not vanish with it."""
    if folder.is_dir():
        return
    _make_lasting(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_path(folder.parent)


def _put_in_place(path: Path, target: Path, fsync: bool) -> None:
    try:
        if target.exists():
            _carry_over(target, path)
            _replace(path, target)
        else:
            path.rename(target)
        if fsync:
            fsync_path(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"A checkpoint was to be put in place as {target}.",
            f"{type(error).__name__}: {error}",
            "What stood there before is still valid.",
        ) from error


def _carry_over(old: Path, new: Path) -> None:
    """Bring along what lies in the old folder and was not written by saving it."""
    try:
        manifest = read_manifest(old)
    except CheckpointError:
        manifest = None
    written = {name.partition("/")[0] for name in (manifest.files if manifest else ())}
    for entry in sorted(old.iterdir()):
        if entry.name in written or is_ours(entry.name) or (new / entry.name).exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, new / entry.name, symlinks=True, copy_function=_link)
        else:
            _link(entry, new / entry.name)


def _link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """The same file under a second name, so that whoever has it open goes on writing into it; a copy if need be."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _replace(path: Path, target: Path) -> None:
    """Put `path` in the place of `target`, whose old contents end up under another name and are discarded."""
    if exchange(path, target):
        return
    aside = beside(target, "old")
    target.rename(aside)
    try:
        path.rename(target)
    except OSError:
        aside.rename(target)
        raise
    discard(aside)


def exchange(first: Path, second: Path) -> bool:
    """Let two names change places in one step; False where the system or file system cannot, and nothing was done."""
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


def discard(path: Path) -> None:
    """Remove a folder, where it is still there; what cannot be removed is left for `recover`."""
    shutil.rmtree(path, ignore_errors=True)


def recover(parent: Path) -> None:
    """Clean up after processes that died while saving: put back what they moved aside, remove what they left half done.

    Folders of processes that may be alive are left alone.
    """
    for entry in unfinished(parent):
        match = _STAGED.fullmatch(entry.name)
        if match is None or not left_behind(entry):
            continue
        target = parent / match["name"]
        if match["kind"] == "old" and not target.exists():
            entry.rename(target)
        else:
            discard(entry)


def unfinished(parent: Path) -> list[Path]:
    """Folders that saves have not completed, or had moved aside."""
    return sorted(entry for entry in parent.iterdir() if _STAGED.fullmatch(entry.name))


def left_behind(entry: Path) -> bool:
    """Whether the process that made one of these folders is gone; one of another machine is given a day."""
    match = _STAGED.fullmatch(entry.name)
    if match is None:
        return False
    try:
        if match["host"] != _host() or os.name == "nt":
            return time.time() - entry.stat().st_mtime > _FORGOTTEN
        os.kill(int(match["pid"]), 0)  # asks whether the process is there, except on Windows
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
