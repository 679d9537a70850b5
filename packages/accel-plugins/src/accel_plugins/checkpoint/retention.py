"""The checkpoints of a project: list them, find the newest valid one, and remove the oldest."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from accel_plugins.checkpoint.locks import FolderLock
from accel_plugins.checkpoint.manifest import Verdict, verify
from accel_plugins.checkpoint.recovery import erase, is_incomplete, located, missing, recover
from accel_state.errors import CheckpointError

__all__ = ("Checkpoint", "available", "beyond", "checkpoints", "find_newest", "number_of", "remove_oldest", "surplus")

_NUMBERED_NAME: Final = re.compile(r"checkpoint_(\d+)")

_NO_CHECKPOINTS: Final[Mapping[Path, str]] = MappingProxyType({})

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A folder `checkpoint_<number>`."""

    path: Path
    number: int

    def verdict(self, *, hashes: bool = False) -> Verdict:
        """The comparison of the folder with its manifest."""
        return verify(self.path, hashes=hashes)


def number_of(name: str) -> int | None:
    """N of a name `checkpoint_N`; None of another name.

    Example:
        >>> number_of("checkpoint_12"), number_of("best")
        (12, None)
    """
    match = _NUMBERED_NAME.fullmatch(name)
    return None if match is None else int(match[1])


def checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a folder, lowest number first, without those that are being written or removed."""
    if not folder.is_dir():
        return []
    numbers = {entry: number_of(entry.name) for entry in folder.iterdir()}
    numbered = [Checkpoint(entry, number) for entry, number in numbers.items() if number is not None]
    return sorted((one for one in numbered if _is_whole(one.path)), key=lambda one: one.number)


def _is_whole(path: Path) -> bool:
    return path.is_dir() and not is_incomplete(path)


def available(folder: Path) -> list[Checkpoint]:
    """Restore checkpoints that dead runs had moved aside, and list all; lowest number first."""
    recover(folder)
    complete = checkpoints(folder)
    for name in missing(folder):
        number = number_of(name)
        if number is not None and (path := located(folder / name)) is not None:
            complete.append(Checkpoint(path, number))
    return sorted(complete, key=lambda checkpoint: checkpoint.number)


def find_newest(folder: Path, *, hashes: bool = False, damaged: Mapping[Path, str] = _NO_CHECKPOINTS) -> Path:
    """The newest valid checkpoint of a folder; logs why newer ones are skipped.

    Args:
        folder: the folder with the checkpoints.
        hashes: compare contents; False: compare only sizes.
        damaged: checkpoints that are known to be damaged, with the reason.

    A folder without a manifest, as other libraries write it, is used only if no folder has one.

    Raises:
        CheckpointError: there is none; the message lists what is wrong with each folder.
    """
    reasons: list[str] = []
    foreign: list[Checkpoint] = []
    for candidate in reversed(available(folder)):
        if candidate.path in damaged:
            reasons.append(f"{candidate.path.name}: {damaged[candidate.path]}")
            continue
        verdict = candidate.verdict(hashes=hashes)
        if verdict.good:
            for reason in reasons:
                logger.warning("Skipped %s", reason)
            return candidate.path
        if verdict.damage:
            reasons.append(f"{candidate.path.name}: {' '.join(verdict.damage)}")
        else:
            foreign.append(candidate)
            reasons.append(f"{candidate.path.name}: it has no manifest.")
    if foreign and len(foreign) == len(reasons):
        logger.warning("%s has no manifest, so it may be incomplete.", foreign[0].path)
        return foreign[0].path
    raise CheckpointError(
        f"Cannot find a valid checkpoint in {folder}.",
        " ".join(reasons) or "It has no folder checkpoint_<number>.",
        "Specify a checkpoint, or start without one.",
    )


def beyond(written: Mapping[T, float], limit: int, period: float | None = None) -> list[T]:
    """The checkpoints to remove.

    Args:
        written: the time at which each was written, in seconds since 1970; oldest first.
        limit: number of newest checkpoints to keep.
        period: in seconds; of the older ones, the first of each period is kept. None: keep none of them.

    Example:
        >>> beyond({"a": 0.0, "b": 50.0, "c": 70.0, "d": 80.0}, 1, 60.0)
        ['b']
    """
    older = list(written)[: max(0, len(written) - limit)]
    if period is None:
        return older
    first: dict[int, T] = {}
    for one in written:
        first.setdefault(int(written[one] // period), one)
    kept = set(first.values())
    return [one for one in older if one not in kept]


def surplus(folder: Path, limit: int, period: float | None = None) -> dict[Path, Verdict]:
    """The checkpoints that `remove_oldest` would remove, as they were found."""
    verdicts = {checkpoint.path: checkpoint.verdict() for checkpoint in checkpoints(folder)}
    written = {path: 0.0 if one.manifest is None else one.manifest.written for path, one in verdicts.items()}
    newest_good = next((path for path in reversed(verdicts) if verdicts[path].good), None)
    return {path: verdicts[path] for path in beyond(written, limit, period) if path != newest_good}


def remove_oldest(folder: Path, limit: int, period: float | None = None) -> list[Path]:
    """Remove the oldest checkpoints until `limit` are left, and return the removed ones.

    Called after a commit. The newest valid checkpoint is never removed, even if newer ones are damaged or have no
    manifest. One that is being read or uploaded stays until the next call.

    Args:
        folder: the folder with the checkpoints.
        limit: number of checkpoints to keep.
        period: see `beyond`.
    """
    removed = []
    for path, verdict in surplus(folder, limit, period).items():
        try:
            if _is_removed(path, verdict):
                removed.append(path)
        except OSError as error:
            # The new checkpoint is complete; an additional old one does not justify an error.
            logger.warning("%s could not be removed: %s", path, error)
    return removed


def _is_removed(path: Path, listed: Verdict) -> bool:
    """Remove a checkpoint, unless somebody uses it, or another run has replaced it since it was listed."""
    if listed.manifest is None and not listed.damage:
        # Another library's; it gets the lock that removals need.
        FolderLock.mark(path).close()
    with FolderLock.seize(path, by_user=True) or nullcontext() as lock:
        if lock is None or (listed.manifest is not None and verify(lock.path).manifest != listed.manifest):
            return False
        erase(lock)
    return True
