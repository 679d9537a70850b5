"""Copy checkpoints to a store while training continues, one at a time, and retry failed copies."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from accel_plugins.checkpoint.locks import FolderLock
from accel_plugins.checkpoint.remote import RemoteCheckpoints
from accel_state.errors import CheckpointError

__all__ = ("Uploader",)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Upload:
    """A checkpoint to copy; see `RemoteCheckpoints.upload`."""

    folder: Path
    lock: FolderLock
    data: str
    rank: int
    ranks: tuple[int, ...]


class Uploader:
    """Copies checkpoints to a store, one at a time, in a thread.

    While a checkpoint waits, its folder is open and locked: what is copied is this save, also when another one takes
    its name, and retention leaves it alone. Of saves into one folder only the last one waits.

    Args:
        remote: the checkpoints of the store.
        keep: number of newest numbered checkpoints to keep there; None: keep all.
        period: see `accel_plugins.checkpoint.retention.beyond`.
    """

    def __init__(self, remote: RemoteCheckpoints, keep: int | None = None, period: float | None = None) -> None:
        self.remote, self.keep, self.period = remote, keep, period
        self._waiting: dict[Path, _Upload] = {}
        self._failed: dict[Path, _Upload] = {}
        self._active: _Upload | None = None
        self._folders: dict[str, Path] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        _uploaders.add(self)

    def add(self, folder: Path, data: str, rank: int = 0, ranks: Sequence[int] = (0,)) -> None:
        """Copy a complete checkpoint under the name of its folder, then retry failed copies.

        Args:
            folder: the checkpoint.
            data: 32 hexadecimal digits, unique to this save.
            rank: the process that calls this.
            ranks: the ranks that upload files of this checkpoint.
        """
        try:
            lock = FolderLock.share(folder)
        except OSError as error:
            logger.error("The checkpoint %s is not copied to %s: %s", folder, self.remote.store.url, error)
            return
        if lock is None:
            logger.error("The checkpoint %s is not copied to %s: it was removed.", folder, self.remote.store.url)
            return
        with self._changed:
            replaced = [self._waiting.pop(folder, None), self._failed.pop(folder, None)]
            self._waiting[folder] = _Upload(folder, lock, data, rank, tuple(ranks))
            self._retry()
        for upload in filter(None, replaced):
            upload.lock.close()

    def _retry(self) -> None:
        """Queue failed copies again, and start the thread; it ends by itself when nothing waits."""
        self._waiting.update(self._failed)
        self._failed.clear()
        if self._waiting and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="accel-upload", daemon=True)
            self._thread.start()

    def wait(self, seconds: float | None = None) -> list[Path]:
        """Wait until all copies are made or have failed.

        Args:
            seconds: maximum time to wait; None: no limit.

        Returns:
            Folders that are not on the store.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and self._active is None, seconds)
            active = [] if self._active is None else [self._active]
            return [upload.folder for upload in (*active, *self._waiting.values(), *self._failed.values())]

    def close(self) -> None:
        """Wait for active copies, retry failed ones once, and log the folders that are not on the store."""
        until = time.monotonic() + self.remote.deadline
        self.wait(max(until - time.monotonic(), 0.0))
        with self._changed:
            self._retry()
        if missing := self.wait(max(until - time.monotonic(), 0.0)):
            logger.error(
                "These checkpoints are not in %s: %s. Copy each with: accel checkpoint copy FOLDER %s/NAME",
                self.remote.store.url,
                ", ".join(map(str, missing)),
                self.remote.store.url,
            )
            with self._changed:
                for upload in self._failed.values():
                    upload.lock.close()
                self._failed.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                folder = next(iter(self._waiting), None)
                if folder is None:
                    self._thread = None
                    return
                upload = self._active = self._waiting.pop(folder)
            failure = self._attempt(upload)
            if failure is not None:
                logger.error("%s The copy is retried after the next one.", failure)
            with self._changed:
                self._active = None
                # A newer save under this name takes the place of a failed one.
                if failure is not None and folder not in self._waiting:
                    self._failed[folder] = upload
                else:
                    upload.lock.close()
                self._changed.notify_all()

    def _attempt(self, upload: _Upload) -> Exception | None:
        try:
            first = self._folders.setdefault(upload.folder.name, upload.folder)
            if first != upload.folder:
                raise CheckpointError(
                    f"Cannot copy the checkpoint {upload.folder} to {self.remote.store.url}.",
                    f"The copy of {first} has the same name there and would be replaced.",
                    "Save checkpoints under different names, or use automatic_checkpoint_naming=True.",
                )
            path, name = upload.lock.path, upload.folder.name
            self.remote.upload(path, name, upload.data, upload.rank, upload.ranks, upload.folder)
            if self.keep is not None and upload.rank == upload.ranks[0]:
                self.remote.remove_oldest(self.keep, self.period, besides=name)
        except CheckpointError as error:
            return error
        except Exception as error:  # no error of a third-party store may stop training
            return CheckpointError(
                f"Cannot copy the checkpoint {upload.folder} to {self.remote.store.url}.",
                f"{type(error).__name__}: {error}",
                "Local checkpoints are unchanged.",
            )
        return None


_uploaders: Final[weakref.WeakSet[Uploader]] = weakref.WeakSet()


@atexit.register
def _finish_at_exit() -> None:
    """At exit, a program waits for its copies, up to the deadline of each store."""
    for uploader in list(_uploaders):
        uploader.close()
