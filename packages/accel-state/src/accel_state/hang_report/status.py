"""Where the processes of one machine are, in files that a launcher reads without the store and without torch.

    os.environ[STATUS_FOLDER] = folder      # the launcher, before it starts the processes
    ask_for_status(folder)                  # let them look closely for some seconds
    seen = read_status(folder)              # by rank; what a process wrote last, about half a second ago
    describe(seen, world_size)

Each process writes its file twice a second from the thread that watches; one that cannot (stopped, or inside of native
code that holds the interpreter) leaves its last one, whose `time` gets old. One process of a machine, whoever asks says
which, also writes what it hears of the other machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from typing import Final, NamedTuple

from accel_state.hang_report.sightings import Sighting

__all__ = ("STATUS_FOLDER", "Heard", "StatusFile", "ask_for_others", "ask_for_status", "read_heard", "read_status")

STATUS_FOLDER: Final = "ACCEL_STATUS_FOLDER"
"""Variable that names the folder; without it nothing is written."""

_ASK: Final = "ask"
_ASK_OTHERS: Final = "ask-others"
_HEARD: Final = "heard.json"
_ASKED_FOR: Final = 5.0
"""Seconds for which processes look closely after they were asked."""

_MOST_BYTES: Final = 64 * 1024
_MOST_BYTES_HEARD: Final = 64 * 2**20


class Heard(NamedTuple):
    """What one process knows of all, as it read the store of the run.

    Args:
        time: when it wrote this, seconds since the epoch.
        store_answers: whether the store answered.
        sightings: by rank; ranks that never published are missing.
        ages: seconds since something new was heard of each of them.
    """

    time: float
    store_answers: bool
    sightings: Mapping[int, Sighting]
    ages: Mapping[int, float]


class StatusFile:
    """The file of one process.

    Args:
        folder: where it is.
        rank: index of the process.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self._folder = folder
        self._rank = str(rank)
        self._ask = os.path.join(folder, _ASK)
        self._path = os.path.join(folder, f"rank{rank}.json")

    @classmethod
    def of_run(cls, rank: int) -> StatusFile | None:
        """That of this process, where the launcher wants one."""
        folder = os.environ.get(STATUS_FOLDER)
        return cls(folder, rank) if folder else None

    def write(self, sighting: Sighting) -> None:
        """Replace what the file says; a folder that has gone does not disturb the run."""
        _replace(self._path, sighting.to_json())

    def write_heard(self, heard: Heard) -> None:
        """Replace what this machine knows of the others."""
        ranks = {rank: [heard.ages[rank], seen.to_json()] for rank, seen in heard.sightings.items()}
        text = json.dumps({"time": heard.time, "store_answers": heard.store_answers, "ranks": ranks})
        _replace(os.path.join(self._folder, _HEARD), text)

    def is_asked(self) -> bool:
        """Whether somebody wants the line where the main thread is."""
        return _is_recent(self._ask)

    def is_asked_for_others(self) -> bool:
        """Whether somebody wants this process to tell of the other machines."""
        path = os.path.join(self._folder, _ASK_OTHERS)
        if not _is_recent(path):
            return False
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(16) == self._rank
        except OSError:
            return False


def _is_recent(path: str) -> bool:
    try:
        return time.time() - os.stat(path).st_mtime < _ASKED_FOR
    except OSError:
        return False


def _replace(path: str, text: str) -> None:
    partial = f"{path}.{os.getpid()}"
    with contextlib.suppress(OSError):
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)


def ask_for_status(folder: str) -> None:
    """Let the processes look closely where they are; within a second they have written it."""
    with open(os.path.join(folder, _ASK), "w", encoding="utf-8"):
        pass


def ask_for_others(folder: str, rank: int) -> None:
    """Let one process, by its rank, write what it hears of the other machines; it takes some seconds."""
    _replace(os.path.join(folder, _ASK_OTHERS), str(rank))


def read_heard(folder: str) -> Heard | None:
    """What a process wrote last of the other machines; None where none did."""
    try:
        with open(os.path.join(folder, _HEARD), encoding="utf-8", errors="replace") as file:
            told = json.loads(file.read(_MOST_BYTES_HEARD))
        sightings, ages = {}, {}
        for rank, (age, text) in told["ranks"].items():
            sighting = Sighting.from_json(text)
            if sighting is not None:
                sightings[int(rank)], ages[int(rank)] = sighting, float(age)
        return Heard(float(told["time"]), bool(told["store_answers"]), sightings, ages)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def read_status(folder: str) -> dict[int, Sighting]:
    """What each process wrote last, by rank; those that wrote nothing are missing."""
    found: dict[int, Sighting] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return found
    for name in names:
        match = re.fullmatch(r"rank(\d{1,7})\.json", name)
        if match is None:
            continue
        try:
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                sighting = Sighting.from_json(file.read(_MOST_BYTES))
        except OSError:
            continue
        if sighting is not None:
            found[int(match[1])] = sighting
    return found
