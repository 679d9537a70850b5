"""Copying checkpoints to a store while training goes on.

Training never ends for a copy that fails: the failure is logged, and the copy is tried again after the next one.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from accel_plugins.checkpoint.remote import RemoteCheckpoints
from accel_state.errors import CheckpointError

__all__ = ("Uploader",)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Upload:
    """One checkpoint to copy; see `RemoteCheckpoints.upload`."""

    folder: Path
    data: str
    rank: int
    ranks: tuple[int, ...]


class Uploader:
    """Copies checkpoints to a store, one after the other, in a thread.

    Args:
        remote: where to.
        keep: how many of the newest numbered checkpoints to keep there; None keeps all.
        period: see `accel_plugins.checkpoint.retention.beyond`.
    """

    def __init__(self, remote: RemoteCheckpoints, keep: int | None = None, period: float | None = None) -> None:
        self.remote, self.keep, self.period = remote, keep, period
        self._waiting: queue.SimpleQueue[_Upload | None] = queue.SimpleQueue()
        self._failed: list[_Upload] = []
        self._busy: list[_Upload] = []
        self._folders: dict[str, Path] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        _uploaders.add(self)

    def add(self, folder: Path, data: str, rank: int = 0, ranks: Sequence[int] = (0,)) -> None:
        """Copy a complete checkpoint under the name of its folder, and after it those whose copies failed."""
        with self._changed:
            again, self._failed = self._failed, []
            added = _Upload(folder, data, rank, tuple(ranks))
            for upload in (added, *(one for one in again if one.folder != folder)):
                self._busy.append(upload)
                self._waiting.put(upload)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="accel-upload", daemon=True)
                self._thread.start()

    @property
    def in_use(self) -> frozenset[Path]:
        """Folders that are still to be read, so that nobody should remove them."""
        with self._changed:
            return frozenset(upload.folder for upload in self._busy)

    def wait(self, seconds: float | None = None) -> list[Path]:
        """Return when all copies are made or failed.

        Args:
            seconds: how long to wait; until the end when None.

        Returns:
            Folders that are not on the store.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, seconds)
            return [upload.folder for upload in (*self._busy, *self._failed)]

    def close(self) -> None:
        """Wait for the copies under way, try those that failed once more, and log what is not on the store."""
        until = time.monotonic() + self.remote.deadline
        self.wait(max(until - time.monotonic(), 0.0))
        with self._changed:
            again, self._failed = self._failed, []
            for upload in again:
                self._busy.append(upload)
                self._waiting.put(upload)
        if missing := self.wait(max(until - time.monotonic(), 0.0)):
            logger.error(
                "These checkpoints are not in %s: %s. Copy each with: accel checkpoint copy FOLDER %s/NAME",
                self.remote.store.url,
                ", ".join(map(str, missing)),
                self.remote.store.url,
            )
            with self._changed:
                self._failed.clear()

    def _run(self) -> None:
        while (upload := self._waiting.get()) is not None:
            failure, there = self._attempt(upload), upload.folder.is_dir()
            if failure is not None:
                logger.error(
                    "%s %s", failure, "It is tried again after the next one." if there else "It is gone by now."
                )
            with self._changed:
                self._busy.remove(upload)
                if failure is not None and there:
                    self._failed.append(upload)
                self._changed.notify_all()

    def _attempt(self, upload: _Upload) -> Exception | None:
        try:
            first = self._folders.setdefault(upload.folder.name, upload.folder)
            if first != upload.folder:
                raise CheckpointError(
                    f"Cannot copy the checkpoint {upload.folder} to {self.remote.store.url}.",
                    f"The copy of {first} has the same name there, and would be replaced.",
                    "Give checkpoints different names, or use automatic_checkpoint_naming=True.",
                )
            self.remote.upload(upload.folder, upload.folder.name, upload.data, upload.rank, upload.ranks)
            if self.keep is not None and upload.rank == upload.ranks[0]:
                self.remote.remove(self.remote.surplus(self.keep, self.period))
        except CheckpointError as error:
            return error
        except Exception as error:  # training goes on whatever a store of somebody else raises
            return CheckpointError(
                f"Cannot copy the checkpoint {upload.folder} to {self.remote.store.url}.",
                f"{type(error).__name__}: {error}",
                "Local checkpoints are untouched.",
            )
        return None


_uploaders: Final[weakref.WeakSet[Uploader]] = weakref.WeakSet()


@atexit.register
def _finish_at_exit() -> None:
    """A program that ends waits for its copies, up to the deadline of each store."""
    for uploader in list(_uploaders):
        uploader.close()
