"""What the operating system reports about another process, without the help of that process.

Linux reports all of this in `/proc`. On other systems only `state_of` works, and reports only whether a process exists.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Final, Literal, NamedTuple

__all__ = (
    "CGROUP",
    "ProcessInfo",
    "State",
    "environment_of",
    "numbers_of",
    "oom_kills",
    "process_info",
    "processor_seconds",
    "state_of",
    "with_variable",
)

State = Literal["ended", "stopped", "uninterruptible", "alive"]

_STATES_BY_LETTER: Final[dict[str, State]] = {
    # Also if its parent has not waited for it yet.
    "Z": "ended",
    "X": "ended",
    "T": "stopped",
    "t": "stopped",
    "D": "uninterruptible",
}


class ProcessInfo(NamedTuple):
    """One process at one moment.

    Args:
        state: whether it runs.
        started: when it was started, in clock ticks since boot; together with the pid this identifies a process.
        memory: bytes of its resident set, including shared memory.
        owner: user id of its owner.
    """

    state: State
    started: int
    memory: int
    owner: int


def process_info(pid: int) -> ProcessInfo | None:
    """What the system reports about a process; None if there is no such process or no report."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
            owner = os.fstat(file.fileno()).st_uid
        return ProcessInfo(
            state=_STATES_BY_LETTER.get(fields[0], "alive"),
            started=int(fields[19]),
            memory=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
            owner=owner,
        )
    except (OSError, IndexError, ValueError):
        return None


def processor_seconds(pid: int) -> float | None:
    """Processor time of a process, its children and theirs, also of ended ones; None if it is not reported."""
    ticks, left = 0, [str(pid)]
    while left:
        one = left.pop()
        try:
            with open(f"/proc/{one}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            # Its own, and that of its ended children.
            ticks += sum(map(int, fields[11:15]))
            for thread in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{thread}/children", encoding="ascii") as file:
                    left += file.read().split()
        except (OSError, IndexError, ValueError):
            # A child may end meanwhile.
            if one == str(pid):
                return None
    return ticks / os.sysconf("SC_CLK_TCK")


def state_of(pid: int) -> State | None:
    """Whether a process runs; None if the system does not report it."""
    if sys.platform == "linux":
        info = process_info(pid)
        return "ended" if info is None else info.state
    if os.name != "posix":
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "ended"
    except PermissionError:
        return "alive"
    return "alive"


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which a process was started; empty if this user may not read it."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = os.fsdecode(file.read()).split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def with_variable(name: str, value: str) -> set[int]:
    """Pids of the other processes of this machine that were started with this value of a variable."""
    wanted = b"\0" + f"{name}={value}".encode() + b"\0"
    pids = set()
    for entry in os.listdir("/proc") if sys.platform.startswith("linux") else ():
        if entry.isdecimal() and int(entry) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                if wanted in b"\0" + file.read():
                    pids.add(int(entry))
    return pids


CGROUP: Final = "/sys/fs/cgroup"
"""Folder with the system's statistics of the container, or of the whole machine, in which this process runs."""


def oom_kills() -> int:
    """How many processes of this container or machine the system has killed because it ran out of memory."""
    counts = numbers_of(os.path.join(CGROUP, "memory.events")) or numbers_of("/proc/vmstat")
    return counts.get("oom_kill", 0)


def numbers_of(path: str) -> dict[str, int]:
    """The lines of a system file that consist of a name and a number; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            words = [line.split() for line in file]
    except (OSError, ValueError):
        return {}
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}
