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
from typing import Final, TypeVar

from accel_plugins.checkpoint.manifest import Verdict, verify
from accel_plugins.checkpoint.recovery import Claim, discard, fingerprint, located, missing, recover
from accel_state.errors import CheckpointError

__all__ = ("Checkpoint", "available", "beyond", "checkpoints", "find_newest", "number_of", "remove_oldest", "surplus")

_NAME: Final = re.compile(r"checkpoint_(\d+)")

_NONE: Final[Mapping[Path, str]] = MappingProxyType({})

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A folder `checkpoint_<number>`."""

    path: Path
    number: int

    def verdict(self, *, hashes: bool = False) -> Verdict:
        """How it compares with its manifest."""
        return verify(self.path, hashes=hashes)


def number_of(name: str) -> int | None:
    """N of a name `checkpoint_N`; None of another name.

    Example:
        >>> number_of("checkpoint_12"), number_of("best")
        (12, None)
    """
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[1])


def checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a folder, oldest number first; staging folders do not count."""
    if not folder.is_dir():
        return []
    found = ((entry, number_of(entry.name)) for entry in folder.iterdir() if entry.is_dir())
    return sorted((Checkpoint(entry, number) for entry, number in found if number is not None), key=lambda c: c.number)


def available(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a folder, after what dead runs had moved aside was put back; oldest number first."""
    recover(folder)
    known = checkpoints(folder)
    for name in missing(folder):
        number = number_of(name)
        if number is not None and (found := located(folder / name)) is not None:
            known.append(Checkpoint(found, number))
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
        logger.warning("%s has no manifest, so it may be incomplete.", foreign[0].path)
        return foreign[0].path
    raise CheckpointError(
        f"Cannot find a good checkpoint in {folder}.",
        " ".join(reasons) or "There is no folder called checkpoint_<number>.",
        "Name a checkpoint, or start without one.",
    )


def beyond(written: Mapping[T, float], limit: int, period: float | None = None) -> list[T]:
    """What is to be removed of some checkpoints.

    Args:
        written: when each was written, in seconds since 1970; the oldest comes first.
        limit: how many of the newest stay.
        period: seconds; of the older ones the first of each such period stays. None keeps none of them.

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


def surplus(folder: Path, limit: int, in_use: Collection[Path] = (), period: float | None = None) -> list[Path]:
    """What `remove_oldest` would remove."""
    known, written, newest_good = checkpoints(folder), dict[Path, float](), None
    for checkpoint in known:
        verdict = checkpoint.verdict()
        written[checkpoint.path] = verdict.manifest.written if verdict.manifest is not None else 0.0
        newest_good = checkpoint.path if verdict.good else newest_good
    return [path for path in beyond(written, limit, period) if path != newest_good and path not in in_use]


def remove_oldest(folder: Path, limit: int, in_use: Collection[Path] = (), period: float | None = None) -> list[Path]:
    """Remove the oldest checkpoints until `limit` are left, and return what was removed.

    Called after a commit. The newest good checkpoint is never removed: what is damaged or without a manifest does not
    take its place.

    Args:
        folder: holds the checkpoints.
        limit: how many to leave.
        in_use: checkpoints that are still to be copied elsewhere, which stay until the next call.
        period: see `beyond`.
    """
    removed = []
    seen = dict(_fingerprints(folder))
    for path in surplus(folder, limit, in_use, period):
        try:
            with ExitStack() as claimed:
                if path in seen and _is_removed(path, _aside(path, claimed), seen[path]):
                    removed.append(path)
        except OSError as error:
            # The new checkpoint is in place; one too many does not justify an error.
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
