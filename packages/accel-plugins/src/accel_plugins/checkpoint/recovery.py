"""What runs that died left beside the names of checkpoints: it is put back where a name is missing, and else removed.

A folder beside a name ends with its kind and a token: "tmp" is on its way in, "old" had the name and was moved
aside, "del" is being removed. Folders of one token belong to the record of that token, whose owner may live.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_plugins.checkpoint.manifest import verify, walk
from accel_plugins.checkpoint.ownership import RECORD, age, taken_over
from accel_state.untrusted import read_limited

__all__ = ("discard", "fingerprint", "is_left_behind", "located", "missing", "recover", "unfinished")

logger = logging.getLogger(__name__)

_BESIDE: Final = re.compile(
    r"(?P<name>.+)\.(?P<kind>tmp|old|del)-(?:(?P<token>[0-9a-f]{16})|[0-9a-f]{8}-\d+-[0-9a-f]{8})"
)
"""The second form has no record: it names a host and a process, as version 0.1.0 did."""

_FORGOTTEN: Final = 24 * 3600.0
"""Seconds without a change after which a folder without a record counts as left behind."""

_BETWEEN_RENAMES: Final = 2.0
"""Seconds to wait for a process that lives to put its checkpoint in place of the one that it moved aside."""


def located(target: Path) -> Path | None:
    """Where a checkpoint is to be read; what a run that died had moved aside is put back first, and nothing removed.

    Returns:
        `target`; where it is missing and the folder can only be read, the whole checkpoint beside it that would have
        been put there; None when there is neither.
    """
    if target.exists():
        return target
    real = Path(os.path.realpath(target))
    until = time.monotonic() + _BETWEEN_RENAMES
    while not real.exists():
        left = [entry for entry in unfinished(real.parent) if _name(entry) == real.name]
        if any(_kind(entry) == "old" and not is_left_behind(entry) for entry in left) and time.monotonic() < until:
            time.sleep(0.02)
            continue
        # What had the name is put back even where its owner may live: that one then moves it aside again.
        found = _best(entry for entry in left if _kind(entry) == "old" or is_left_behind(entry))
        if found is None or _is_put_back(found, real):
            break
        if os.path.isdir(found):
            logger.warning("%s is read from %s, because it cannot be put back.", target, found)
            return found
    return target if target.exists() else None


def recover(parent: Path) -> None:
    """Put back what dead processes moved aside, and remove what they left half done; what may live is left alone."""
    dead: dict[str, list[Path]] = defaultdict(list)
    records: list[Path] = []
    with ExitStack() as claimed:
        for record, entries in _groups(parent):
            if claimed.enter_context(_gone(record, entries)):
                records += [] if record is None else [record]
                for entry in entries:
                    dead[_name(entry)].append(entry)
        for name, entries in dead.items():
            _settle(parent / name, entries)
    for record in records:
        if not any(os.path.lexists(entry) for entry in _folders_of(record)):
            with suppress(OSError):
                record.unlink()


def unfinished(parent: Path) -> list[Path]:
    """Folders that saves have not completed, or had moved aside."""
    return sorted(entry for entry in _entries(parent) if _BESIDE.fullmatch(entry.name))


def missing(parent: Path) -> list[str]:
    """Names that no folder has, although one that may be put back is beside them."""
    names = {_name(entry) for entry in unfinished(parent) if _kind(entry) != "del"}
    return sorted(name for name in names if not os.path.lexists(parent / name))


def is_left_behind(entry: Path) -> bool:
    """Whether the process that made one of these folders is gone."""
    token = _parts(entry)["token"]
    record = entry.with_name(f"{_name(entry)}.owner-{token}")
    with _gone(record if token and os.path.lexists(record) else None, [entry]) as gone:
        return gone


def discard(entry: Path) -> None:
    """Remove one of these folders, where it is still there; what cannot be removed is left for `recover`.

    It is renamed first, so that a removal that is cut short leaves nothing that looks like a checkpoint.
    """
    doomed = entry.with_name(f"{_name(entry)}.del-{_parts(entry)['token'] or secrets.token_hex(8)}")
    try:
        entry.rename(doomed)
    except FileNotFoundError:
        return
    except OSError:
        doomed = entry
    shutil.rmtree(doomed, ignore_errors=True)


def fingerprint(folder: Path) -> tuple[int, bytes | None]:
    """What differs when another checkpoint has taken the name of a folder, or its entries have changed."""
    changed = folder.stat().st_mtime_ns
    try:
        return changed, read_limited(folder / MANIFEST_NAME)
    except OSError:
        return changed, None


def _settle(target: Path, entries: list[Path]) -> None:
    """Put one of the folders that the dead left for a name in its place if that is free, and remove the others."""
    if not os.path.lexists(target) and (found := _best(entries)) is not None:
        _is_put_back(found, target)
    for entry in entries:
        if os.path.lexists(target) or _rank(entry) is None:
            discard(entry)


def _is_put_back(entry: Path, target: Path) -> bool:
    try:
        entry.rename(target)
    except OSError as error:
        logger.warning("%s could not be put back as %s: %s", entry, target.name, error)
        return False
    logger.warning("%s was put back as %s: the run that saved it did not finish.", entry.name, target)
    return True


def _best(entries: Iterable[Path]) -> Path | None:
    """Which of the folders left for a name is to have it."""
    ranked = [(rank, entry) for entry in entries if (rank := _rank(entry)) is not None]
    return max(ranked)[1] if ranked else None


def _rank(entry: Path) -> tuple[int, float] | None:
    """How well a folder replaces a missing checkpoint: what had its name comes before what did not have it yet."""
    if _kind(entry) == "del":
        return None
    verdict = verify(entry)
    written = verdict.manifest.written if verdict.manifest is not None else 0.0
    if _kind(entry) == "old":
        return (0 if verdict.damage else 2), written
    return (1, written) if verdict.good else None


def _groups(parent: Path) -> list[tuple[Path | None, list[Path]]]:
    """What belongs to one owner each: its record and its folders."""
    records = {}
    folders: dict[str, list[Path]] = defaultdict(list)
    for entry in _entries(parent):
        if match := RECORD.fullmatch(entry.name):
            records[match["token"]] = entry
        elif match := _BESIDE.fullmatch(entry.name):
            folders[match["token"] or entry.name].append(entry)
    return [(records.get(token), folders[token]) for token in sorted(records.keys() | folders.keys())]


@contextmanager
def _gone(record: Path | None, entries: list[Path]) -> Iterator[bool]:
    """Whether the owner of a group does not live any more."""
    if record is None:
        yield all(map(_is_forgotten, entries))
        return
    with taken_over(record) as gone:
        yield gone


def _is_forgotten(entry: Path) -> bool:
    """Whether nothing in a folder has changed for long; for folders without a record."""
    try:
        changed = max(path.stat().st_mtime for path in (entry, *walk(entry)))
    except OSError:
        return False
    idle = age(changed, entry.parent)
    return idle is not None and idle > _FORGOTTEN


def _folders_of(record: Path) -> list[Path]:
    match = RECORD.fullmatch(record.name)
    assert match is not None
    return [record.with_name(f"{match['name']}.{kind}-{match['token']}") for kind in ("tmp", "old", "del")]


def _entries(parent: Path) -> list[Path]:
    try:
        return sorted(parent.iterdir())
    except OSError:
        return []


def _parts(entry: Path) -> re.Match[str]:
    match = _BESIDE.fullmatch(entry.name)
    assert match is not None, entry
    return match


def _name(entry: Path) -> str:
    return _parts(entry)["name"]


def _kind(entry: Path) -> str:
    return _parts(entry)["kind"]
