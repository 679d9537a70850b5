"""Making a folder valid all at once: it is filled under another name, made durable, and put in place by a rename.

What stood under the name before stays valid until that moment. Where the system can exchange two names in one step, it
does; elsewhere the old folder is moved aside, and whoever looks for it next puts it back should the process die in
between.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accel_ops.agreement import StoreBarrier
from accel_plugins.checkpoint.files import is_ours
from accel_plugins.checkpoint.manifest import read_manifest
from accel_plugins.checkpoint.ownership import Claim
from accel_plugins.checkpoint.recovery import discard, fingerprint, recover
from accel_plugins.checkpoint.sealing import Sealer, fsync_path
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("exchange", "staging")

_ATTEMPTS: Final = 100
_LONGEST_PAUSE: Final = 0.02
_CONTENDED: Final = (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY)
"""What it looks like when another run puts a checkpoint under the same name, or takes one away."""

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
    asked, remedy = f"Cannot save a checkpoint as {target}.", "Older checkpoints are untouched."
    barrier = StoreBarrier(process, f"save/{target.name}", asked, deadline, CheckpointError, remedy)
    path, claim = _open(target, process, barrier)
    try:
        try:
            yield path
            barrier.wait("write")
            if claim is not None:
                sealer.seal(path, {"world_size": process.world_size, **(facts or {})})
            barrier.wait("complete")
            if claim is not None:
                _put_in_place(claim, target, sealer, fsync)
        except BaseException as error:
            if isinstance(error, (OSError, CheckpointError)):
                # A process that fails takes the folder away under the hands of the others; theirs is then not the first
                # failure.
                barrier.check()
            barrier.fail(error)
            raise
        barrier.wait("commit", last=True)
    finally:
        sealer.close()
        _leave(claim)


def _open(target: Path, process: Process, barrier: StoreBarrier) -> tuple[Path, Claim | None]:
    """The staging folder, and the claim of the process that made it and has to put it in place."""
    with barrier.reporting():
        claim = _make(target) if process.rank == 0 else None
        try:
            token = barrier.wait("open", "" if claim is None else claim.token)
            path = target.with_name(f"{target.name}.tmp-{token}")
            if process.topology.is_local_main and not path.exists():
                claim = _make(target, token)
            barrier.wait("enter")
        except BaseException:
            _leave(claim)
            raise
    return path, claim


def _leave(claim: Claim | None) -> None:
    """Remove what a save that ends leaves beside its name: the folder that failed, or that was replaced."""
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
        except OSError:
            claim.release()
            raise
    except OSError as error:
        raise CheckpointError(
            f"Cannot save a checkpoint as {target}.",
            f"{type(error).__name__}: {error}",
            "Name a folder in a place where you may write.",
        ) from error
    return claim


def _make_lasting(folder: Path) -> None:
    """Create a folder and those above it, each known to the disk: what is saved in it must not vanish with it."""
    if folder.is_dir():
        return
    _make_lasting(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_path(folder.parent)


def _put_in_place(claim: Claim, target: Path, sealer: Sealer, fsync: bool) -> None:
    """Give the staging folder its name.

    Another run may put a checkpoint under the same name meanwhile; what stood there when this one comes last makes way.
    """
    path, attempts = claim.path("tmp"), _ATTEMPTS
    try:
        while not _is_placed(claim, path, target, sealer):
            attempts -= 1
            if not attempts:
                raise FileExistsError(f"{target} was changed by another run {_ATTEMPTS} times meanwhile")
            time.sleep(_LONGEST_PAUSE * random.random())
        if fsync:
            fsync_path(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"Cannot put a checkpoint in place as {target}.",
            f"{type(error).__name__}: {error}",
            "What stood there before is still valid.",
        ) from error


def _is_placed(claim: Claim, path: Path, target: Path, sealer: Sealer) -> bool:
    """Try to give a folder its name; False when another run changed what stands there meanwhile."""
    carried: list[Path] = []
    try:
        if target.exists():
            before = fingerprint(target)
            _carry_over(target, path, carried)
            if fingerprint(target) != before:
                raise FileExistsError(errno.EEXIST, "another run changed it meanwhile", str(target))
        _check_ours(claim, path, target, sealer)
        if exchange(path, target):
            return True
        _move_in(path, target, claim.path("old"))
    except OSError as error:
        for entry in carried:
            _remove(entry)
        if error.errno in _CONTENDED and path.is_dir():
            return False
        raise
    return True


def _check_ours(claim: Claim, path: Path, target: Path, sealer: Sealer) -> None:
    """Refuse a folder that another process took for left behind, or changed since it was sealed."""
    changed = [] if claim.holds else ["Another run took its folder for left behind."]
    changed += [f"{name} is gone or has another content than was written." for name in sealer.changed(path)]
    if changed:
        raise CheckpointError(
            f"Cannot put a checkpoint in place as {target}.",
            " ".join(changed),
            "What stood there before is still valid. Let nothing else write there, and save again.",
        )


def _move_in(path: Path, target: Path, aside: Path) -> None:
    """Put a folder in the place of another without an exchange; `located` finds what is aside in between."""
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
            # Another run put a newer one there, unless it is back.
            discard(aside)
        raise
    discard(aside)


def _carry_over(old: Path, new: Path, carried: list[Path]) -> None:
    """Copy files of the old folder that its save did not write; `carried` lists the copies, also after an error."""
    try:
        manifest = read_manifest(old)
    except CheckpointError:
        manifest = None
    written = {name.partition("/")[0] for name in (manifest.files if manifest else ())}
    for entry in sorted(old.iterdir()):
        if entry.name in written or is_ours(entry.name) or (new / entry.name).exists():
            continue
        carried.append(new / entry.name)
        _bring(entry, new / entry.name)


def _bring(entry: Path, to: Path) -> None:
    if not entry.is_dir() or entry.is_symlink():
        _link(entry, to)
        return
    to.mkdir()
    for inner in sorted(entry.iterdir()):
        _bring(inner, to / inner.name)
    shutil.copystat(entry, to)


def _link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """The same file under a second name, so that whoever has it open goes on writing into it; a copy if need be."""
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
