"""Where the processes of one machine are, in files that a launcher reads without the store and without torch.

    os.environ[STATUS_FOLDER] = folder      # the launcher, before it starts the processes
    ask_for_status(folder)                  # let them look closely for some seconds
    seen = read_status(folder)              # by rank; what a process wrote last, about half a second ago
    describe(seen, world_size)

Each process writes its file twice a second from the thread that watches; one that cannot (stopped, or inside of native
code that holds the interpreter) leaves its last one, whose `time` gets old.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import Final

from accel_state.hang_report.sightings import Sighting

__all__ = ("STATUS_FOLDER", "StatusFile", "ask_for_status", "read_status")

STATUS_FOLDER: Final = "ACCEL_STATUS_FOLDER"
"""Variable that names the folder; without it nothing is written."""

_ASK: Final = "ask"
_ASKED_FOR: Final = 5.0
"""Seconds for which processes look closely after they were asked."""

_MOST_BYTES: Final = 64 * 1024


class StatusFile:
    """The file of one process.

    Args:
        folder: where it is.
        rank: index of the process.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self._ask = os.path.join(folder, _ASK)
        self._path = os.path.join(folder, f"rank{rank}.json")

    @classmethod
    def of_run(cls, rank: int) -> StatusFile | None:
        """That of this process, where the launcher wants one."""
        folder = os.environ.get(STATUS_FOLDER)
        return cls(folder, rank) if folder else None

    def write(self, sighting: Sighting) -> None:
        """Replace what the file says; a folder that has gone does not disturb the run."""
        partial = f"{self._path}.{os.getpid()}"
        with contextlib.suppress(OSError):
            with open(partial, "w", encoding="utf-8") as file:
                file.write(sighting.to_json())
            os.replace(partial, self._path)

    def is_asked(self) -> bool:
        """Whether the launcher wants the line where the main thread is."""
        try:
            return time.time() - os.stat(self._ask).st_mtime < _ASKED_FOR
        except OSError:
            return False


def ask_for_status(folder: str) -> None:
    """Let the processes look closely where they are; within a second they have written it."""
    with open(os.path.join(folder, _ASK), "w", encoding="utf-8"):
        pass


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
