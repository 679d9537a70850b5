"""Checkpoints of an Accelerator on a remote store: uploaded after each save, downloaded before a load."""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from accel_ops.agreement import StoreBarrier, raise_on_any_rank
from accel_plugins.checkpoint.finalize import Committed
from accel_plugins.checkpoint.remote import RemoteCheckpoint, RemoteCheckpoints, split_url
from accel_plugins.checkpoint.uploads import Uploader
from accel_state.errors import CheckpointError, Conflict

if TYPE_CHECKING:
    from accel_torch.session import Session

__all__ = ("DamagedOnStore", "fetch", "newest_on_store", "probe", "refuse_local_folder", "upload")

logger = logging.getLogger(__name__)


class DamagedOnStore(CheckpointError):
    """Raised when a checkpoint cannot be read from a store; an older one may be."""


def probe(session: Session, folder: Path) -> None:
    """Check before training that a store can store checkpoints; called on every process.

    Args:
        session: the session.
        folder: the folder of automatically named checkpoints.

    Raises:
        Conflict: the store is the folder of the local checkpoints.
        CheckpointError: the store cannot be reached, denies access, or has no conditional writes; raised on every
            process.
    """
    project, process = session.options.project, session.process
    remote = RemoteCheckpoints.at(str(project.remote), project.deadline)

    def work() -> None:
        if project.automatic_checkpoint_naming:
            refuse_local_folder(remote, folder / "checkpoint_0")
        if process.rank == 0:
            remote.probe()

    failed = f"Cannot keep checkpoints in {project.remote}."
    raise_on_any_rank(process, "remote", work, failed, project.deadline, CheckpointError)
    session.uploader = Uploader(remote, *project.retention)


def refuse_local_folder(remote: RemoteCheckpoints, target: Path) -> None:
    """Check that a local checkpoint is not written inside the store, because each would delete files of the other.

    Args:
        remote: the store.
        target: the folder of the local checkpoint.

    Raises:
        Conflict: the store is the checkpoint's folder or its parent.
    """
    if remote.store.local_folder is None:
        return
    folder, target = remote.store.local_folder.resolve(), target.resolve()
    if folder == target.parent or target in (folder, *folder.parents):
        raise Conflict(
            f"Cannot save {target} and copy it to {remote.store.url}.",
            "Both are the same folder: local checkpoints and the store would each delete files of the other.",
            "Give ProjectConfiguration(remote=...) another folder.",
        )


def upload(session: Session, folder: Path, committed: Committed | None) -> None:
    """Begin to upload a committed checkpoint, on each process that created a folder of it. Errors are logged."""
    if session.uploader is not None and committed is not None and committed.is_owner:
        session.uploader.add(folder, committed.save, session.process.rank, committed.owners)


def newest_on_store(session: Session, local: bool, damaged: Collection[str] = ()) -> RemoteCheckpoint | None:
    """The project's newest complete checkpoint on its store; called on the main process.

    Args:
        session: the session.
        damaged: URLs of checkpoints that are known to be damaged.
        local: whether a local checkpoint can be used instead, so that an unreachable store is not an error.

    Raises:
        CheckpointError: the store cannot be reached.
    """
    if session.uploader is None:
        return None
    try:
        return session.uploader.remote.newest(damaged)
    except CheckpointError as error:
        if not local:
            raise
        logger.warning("%s The newest local checkpoint is used.", error)
        return None


def fetch(
    session: Session, barrier: StoreBarrier, url: str, phase: str, stack: ExitStack, missing_ok: bool
) -> Path | None:
    """Download a checkpoint to one local copy on each node; called on every process.

    Args:
        session: the session.
        barrier: the barrier of the load.
        url: the URL of the checkpoint.
        phase: the phase of the barrier; no other phase begins with this text.
        stack: deletes the copy when it is closed.
        missing_ok: return None if the store does not have the checkpoint.

    Raises:
        CheckpointError: the store cannot be reached.
        DamagedOnStore: the checkpoint does not exist or is damaged; on every process.
    """
    process, project = session.process, session.options.project
    store, name = split_url(url)
    token = barrier.wait(f"{phase} token", secrets.token_hex(8))
    folder = Path(tempfile.gettempdir()) / f"accel-{token}-{process.topology.node_rank}"
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    # A process that does not download has nothing to say against it.
    problem, is_there = "", True
    with barrier.reporting():
        if process.topology.is_local_main:
            # Nobody else may read it or put anything there.
            folder.mkdir(mode=0o700)
            remote = RemoteCheckpoints.at(store, project.deadline)
            committed, _, damaged = remote.scan(name)
            if committed:
                try:
                    remote.download(committed[0], folder / name)
                except CheckpointError as error:
                    problem = error.obstacle
            else:
                problem = damaged.get(name, "" if missing_ok else f"{store} has no complete checkpoint of that name.")
            is_there = not problem and bool(committed)
    reply = barrier.wait(f"{phase} done", json.dumps([problem, is_there]), _in_one)
    problem, is_there = json.loads(reply)
    if problem:
        raise DamagedOnStore(
            f"Cannot load the checkpoint {url}.", problem, f"List those that exist: accel checkpoint list {store}"
        )
    return folder / name if is_there else None


def _in_one(answers: Sequence[str]) -> str:
    problems, there = zip(*map(json.loads, answers), strict=True)
    return json.dumps([next(filter(None, problems), ""), all(there)])
