"""Checkpoints of an Accelerator on a store: copied there after each save, fetched from there before a load."""

from __future__ import annotations

import logging
import secrets
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from accel_ops.agreement import StoreBarrier, raise_on_any_rank
from accel_plugins.checkpoint.commit import Committed
from accel_plugins.checkpoint.remote import RemoteCheckpoint, RemoteCheckpoints, Uploader, split_url
from accel_state.errors import CheckpointError, Conflict

if TYPE_CHECKING:
    from accel_torch.members import AcceleratorMembers

__all__ = ("fetch", "newest_on_store", "probe", "refuse_local_folder", "upload")

logger = logging.getLogger(__name__)


def probe(accelerator: AcceleratorMembers, folder: Path) -> None:
    """Refuse a store that checkpoints cannot be kept in, before anything is trained; called on every process.

    Args:
        accelerator: the Accelerator.
        folder: of automatically named checkpoints.

    Raises:
        Conflict: it is the folder of the local checkpoints.
        CheckpointError: on every process; it cannot be reached, refuses, or does not know conditional writes.
    """
    project, process = accelerator._options.project, accelerator.state._process
    remote = RemoteCheckpoints.at(str(project.remote), project.deadline)

    def work() -> None:
        if project.automatic_checkpoint_naming:
            refuse_local_folder(remote, folder / "checkpoint_0")
        if process.rank == 0:
            remote.probe()

    failed = f"Cannot keep checkpoints in {project.remote}."
    raise_on_any_rank(process, "remote", work, failed, project.deadline, CheckpointError)
    accelerator._uploader = Uploader(remote, *project.retention)


def refuse_local_folder(remote: RemoteCheckpoints, target: Path) -> None:
    """Refuse a store in whose files a local checkpoint would be written, because each would remove files of the other.

    Args:
        remote: the store.
        target: what the local checkpoint is called.

    Raises:
        Conflict: the store is the folder of the checkpoint, or the one that it is in.
    """
    if remote.store.local_folder is None:
        return
    folder, target = remote.store.local_folder.resolve(), target.resolve()
    if folder == target.parent or target in (folder, *folder.parents):
        raise Conflict(
            f"Cannot save {target} and copy it to {remote.store.url}.",
            "Both are the same place: the local checkpoints and the store would each remove files of the other.",
            "Give ProjectConfiguration(remote=...) a folder of its own.",
        )


def upload(accelerator: AcceleratorMembers, folder: Path, committed: Committed | None) -> None:
    """Begin to copy a checkpoint that was committed, on each process that made a folder of it.

    What goes wrong is logged.
    """
    if accelerator._uploader is not None and committed is not None and committed.is_owner:
        accelerator._uploader.add(folder, committed.identity, accelerator.state._process.rank, committed.owners)


def newest_on_store(accelerator: AcceleratorMembers, local: bool) -> RemoteCheckpoint | None:
    """The newest complete checkpoint of the project on its store; called on the main process.

    Args:
        local: whether there is a local one to go on with, so that a store that does not answer is not an error.

    Raises:
        CheckpointError: the store does not answer.
    """
    if accelerator._uploader is None:
        return None
    try:
        return accelerator._uploader.remote.newest()
    except CheckpointError as error:
        if not local:
            raise
        logger.warning("%s The newest local checkpoint is taken.", error)
        return None


def fetch(
    accelerator: AcceleratorMembers, barrier: StoreBarrier, url: str, phase: str, stack: ExitStack, missing_ok: bool
) -> Path | None:
    """A local copy of a checkpoint, one on each node; called on every process.

    Args:
        accelerator: the Accelerator.
        barrier: of the load.
        url: of a checkpoint.
        phase: of the barrier; no other phase begins with it.
        stack: removes the copy when it is closed.
        missing_ok: return None where the store has no such checkpoint.

    Raises:
        CheckpointError: the store does not answer, there is no such checkpoint, or it is damaged.
    """
    process, project = accelerator.state._process, accelerator._options.project
    store, name = split_url(url)
    token = barrier.wait(f"{phase} token", secrets.token_hex(8))
    folder = Path(tempfile.gettempdir()) / f"accel-{token}-{process.topology.node_rank}"
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    with barrier.reporting():
        there = True
        if process.topology.is_local_main:
            remote = RemoteCheckpoints.at(store, project.deadline)
            found = next(iter(remote.committed(name)), None)
            there = found is not None
            if found is not None:
                remote.download(found, folder / name)
            elif not missing_ok:
                raise CheckpointError(
                    f"Cannot load the checkpoint {url}.",
                    f"{store} has no complete checkpoint of that name.",
                    f"List those that exist: accel checkpoint list {store}",
                )
    there = bool(barrier.wait(f"{phase} done", "yes" if there else ""))
    return folder / name if there else None
