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
    "seconds_of_descendants",
    "state_of",
    "system_call",
    "with_variable",
)

State = Literal["ended", "stopped", "uninterruptible", "alive"]

_STATES: Final[dict[str, State]] = {
    # Also if its parent has not waited for it yet.
    "Z": "ended",
    "X": "ended",
    "T": "stopped",
    "t": "stopped",
    "D": "uninterruptible",
}

# By machine: system calls that work on files, and which argument is the descriptor (None: the file is not open yet).
_X86_64: Final = {
    0: ("read", 0), 1: ("write", 0), 2: ("open", None), 3: ("close", 0), 17: ("pread", 0), 18: ("pwrite", 0),
    19: ("readv", 0), 20: ("writev", 0), 73: ("flock", 0), 74: ("fsync", 0), 75: ("fdatasync", 0),
    217: ("getdents", 0), 257: ("open", None), 262: ("stat", None),
}  # fmt: skip
_AARCH64: Final = {
    32: ("flock", 0), 56: ("open", None), 57: ("close", 0), 61: ("getdents", 0), 63: ("read", 0), 64: ("write", 0),
    65: ("readv", 0), 66: ("writev", 0), 67: ("pread", 0), 68: ("pwrite", 0), 79: ("stat", None),
    82: ("fsync", 0), 83: ("fdatasync", 0),
}  # fmt: skip
_FILE_CALLS: Final[dict[str, dict[int, tuple[str, int | None]]]] = {"x86_64": _X86_64, "aarch64": _AARCH64}


class ProcessInfo(NamedTuple):
    """One process at one moment.

    Args:
        state: whether it runs.
        started: when it was started, in clock ticks since boot; together with the pid this identifies a process.
        processor_seconds: CPU time of all its threads, in seconds.
        memory: bytes of its resident set, including shared memory.
        owner: user id of its owner.
    """

    state: State
    started: int
    processor_seconds: float
    memory: int
    owner: int


def process_info(pid: int) -> ProcessInfo | None:
    """What the system reports about a process; None if there is no such process or no report."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
            owner = os.fstat(file.fileno()).st_uid
        ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        return ProcessInfo(
            state=_STATES.get(fields[0], "alive"),
            started=int(fields[19]),
            processor_seconds=(int(fields[11]) + int(fields[12])) / ticks,
            memory=int(fields[21]) * page,
            owner=owner,
        )
    except (OSError, IndexError, ValueError):
        return None


def seconds_of_descendants(pid: int) -> float:
    """Processor time of the children of a process and of theirs, also of ended ones; 0 if it is not reported."""
    ticks, left = 0, [str(pid)]
    while left:
        one = left.pop()
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{one}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            # Its own, and that of its ended children; of the process itself only the latter.
            ticks += sum(map(int, fields[13 if one == str(pid) else 11 : 15]))
            for thread in os.listdir(f"/proc/{one}/task"):
                with open(f"/proc/{one}/task/{thread}/children", encoding="ascii") as file:
                    left += file.read().split()
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


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
    found = set()
    for entry in os.listdir("/proc") if sys.platform.startswith("linux") else ():
        if entry.isdecimal() and int(entry) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                if wanted in b"\0" + file.read():
                    found.add(int(entry))
    return found


def system_call(pid: int) -> str:
    """The system call on a file that the main thread of a process is in, such as "read() of /data/train.bin".

    Empty if it is in none, or if this user may not see it (root may; the owner may if `kernel.yama.ptrace_scope` is 0).
    Calls on sockets and terminals do not count.
    """
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            words = file.read().split()
        name, argument = _FILE_CALLS.get(os.uname().machine, {})[int(words[0])]
        if argument is None:
            return f"{name}()"
        path = os.readlink(f"/proc/{pid}/fd/{int(words[1 + argument], 16)}")
    except (OSError, IndexError, KeyError, ValueError):
        return ""
    return f"{name}() of {path}" if path.startswith("/") and not path.startswith("/dev/") else ""


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
