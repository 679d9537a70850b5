"""The checkpoints of a project: listing them, finding the newest good one, and removing the oldest."""

from __future__ import annotations

import errno
import logging
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from accel_plugins.checkpoint.manifest import Verdict, verify
from accel_plugins.checkpoint.ownership import Claim
from accel_plugins.checkpoint.recovery import discard, fingerprint, located, missing, recover
from accel_state.errors import CheckpointError

__all__ = ("Checkpoint", "available", "checkpoints", "find_newest", "remove_oldest", "surplus")

_NAME: Final = re.compile(r"checkpoint_(\d+)")

_NONE: Final[Mapping[Path, str]] = MappingProxyType({})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A folder `checkpoint_<number>`."""

    path: Path
    number: int

    def verdict(self, *, hashes: bool = False) -> Verdict:
        """How it compares with its manifest."""
        return verify(self.path, hashes=hashes)


def checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a folder, oldest number first; staging folders do not count."""
    if not folder.is_dir():
        return []
    found = ((entry, _NAME.fullmatch(entry.name)) for entry in folder.iterdir() if entry.is_dir())
    return sorted((Checkpoint(entry, int(match[1])) for entry, match in found if match), key=lambda c: c.number)


def available(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a folder, after what dead runs had moved aside was put back; oldest number first."""
    recover(folder)
    known = checkpoints(folder)
    for name in missing(folder):
        match = _NAME.fullmatch(name)
        if match is not None and (found := located(folder / name)) is not None:
            known.append(Checkpoint(found, int(match[1])))
    return sorted(known, key=lambda checkpoint: checkpoint.number)


def find_newest(folder: Path, *, hashes: bool = False, damaged: Mapping[Path, str] = _NONE) -> Path:
    """The newest good checkpoint of a folder; why newer ones were passed over is logged.

    Args:
        folder: holds the checkpoints.
        hashes: compare contents; sizes alone otherwise.
        damaged: checkpoints that are known to be damaged, and how.

    A folder without our manifest, as other libraries write it, is taken only when none has one.

    Raises:
        CheckpointError: there is none; the message says what is wrong with each.
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
                logger.warning("Passed over %s", reason)
            return candidate.path
        if verdict.damage:
            reasons.append(f"{candidate.path.name}: {' '.join(verdict.damage)}")
        else:
            foreign.append(candidate)
            reasons.append(f"{candidate.path.name}: it has no manifest.")
    if foreign and len(foreign) == len(reasons):
        logger.warning("%s has no manifest, so whether it is complete cannot be told.", foreign[0].path)
        return foreign[0].path
    raise CheckpointError(
        f"The newest good checkpoint in {folder} was asked for.",
        " ".join(reasons) or "There is no folder called checkpoint_<number>.",
        "Name a checkpoint, or start without one.",
    )


def surplus(folder: Path, limit: int, in_use: Collection[Path] = ()) -> list[Path]:
    """What `remove_oldest` would remove."""
    known = checkpoints(folder)
    newest_good = next((c for c in reversed(known) if c.verdict().good), None)
    oldest = (checkpoint for checkpoint in known[: max(0, len(known) - limit)] if checkpoint != newest_good)
    return [checkpoint.path for checkpoint in oldest if checkpoint.path not in in_use]


def remove_oldest(folder: Path, limit: int, in_use: Collection[Path] = ()) -> list[Path]:
    """Remove the oldest checkpoints until `limit` are left, and return what was removed.

    Called after a commit. The newest good checkpoint is never removed: what is damaged or without a manifest does not
    take its place.

    Args:
        folder: holds the checkpoints.
        limit: how many to leave.
        in_use: checkpoints that are still to be copied elsewhere, which stay until the next call.
    """
    removed = []
    seen = dict(_fingerprints(folder))
    for path in surplus(folder, limit, in_use):
        try:
            with ExitStack() as claimed:
                if path in seen and _is_removed(path, _aside(path, claimed), seen[path]):
                    removed.append(path)
        except OSError as error:
            # What was saved is in place; one checkpoint too many is no reason to fail.
            logger.warning("%s could not be removed: %s", path, error)
    return removed


def _aside(path: Path, claimed: ExitStack) -> Path:
    try:
        return claimed.enter_context(Claim(path)).path("old")
    except OSError:
        # A full disk takes no record, and room has to be made there all the same.
        return path.with_name(f"{path.name}.old-{secrets.token_hex(8)}")


def _fingerprints(folder: Path) -> Iterator[tuple[Path, tuple[int, bytes | None]]]:
    for checkpoint in checkpoints(folder):
        with suppress(OSError):
            yield checkpoint.path, fingerprint(checkpoint.path)


def _is_removed(path: Path, aside: Path, seen: tuple[int, bytes | None]) -> bool:
    """Remove a checkpoint, unless another run has put a newer one under its name since it was seen."""
    path.rename(aside)
    if fingerprint(aside) != seen:
        try:
            aside.rename(path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            return False
    discard(aside)
    return True
