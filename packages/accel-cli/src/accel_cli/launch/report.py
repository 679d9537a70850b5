"""Reports how a run ended: which process failed first and why, with its traceback once, at the end."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from accel_state.exit_codes import RESUME
from accel_state.untrusted import parse_json, printable, read_limited

__all__ = (
    "PORT_TAKEN",
    "Failure",
    "ending",
    "first_failure",
    "meaning",
    "read_record",
    "report",
    "shell_code",
)

_MEANINGS: Final = {
    "SIGKILL": "probably the machine ran out of memory, or a user killed the process; check `dmesg`",
    "SIGSEGV": "a crash in native code; the lines above, if any, show the Python code that called it",
    "SIGABRT": "native code aborted, as gloo does if tensor sizes differ between processes; see the lines above",
    "SIGBUS": "mapped memory is no longer available: a file was truncated, or /dev/shm is full",
    "SIGFPE": "an arithmetic error in native code",
    "SIGILL": "native code was compiled for another processor",
    "SIGTERM": "a user or a batch system requested its end, for example at a time limit",
    "SIGXCPU": "it reached its limit of CPU time",
    "SIGPIPE": "the reader of its output has closed it",
}

_LOST_PEER: Final = (
    r"Connection (closed|reset|refused)|Broken pipe|Application timeout caused pair closure|Timed out waiting \d+ms"
    r"|gloo/|NCCL|[Ss]ocket (has )?(timed out|closed)|recvValue failed|Dist(Network|Store|Backend)Error"
    r"|StoreUnreachable|CollectiveError|remote process (has )?exited|failed to connect to .* server"
    r"|wait timeout after \d+ms"
)
"""Pattern of the errors of a process that has lost its connection to another one; compiled after an error."""

PORT_TAKEN: Final = r"EADDRINUSE|[Aa]ddress already in use|port is in use"
"""Pattern of the errors of a process that could not listen on a port."""

_ABORT: Final = -6

_SEEN_LATE: Final = 1.0
"""Longest delay in seconds until the launcher sees the end of a process."""

_CRASHES: Final = frozenset(
    int(getattr(signal, name)) for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL") if hasattr(signal, name)
)
"""Signals with which native code ends a process."""

_LONGEST: Final = 400
"""Largest number of characters of one rank's error in the summary."""

_MOST_NAMED: Final = 8

_RESUMABLE: Final = (
    f"accel launch: The run was asked to end and saved a checkpoint; launch it again to resume (exit code {RESUME})."
)


class Failure(NamedTuple):
    """One process that failed.

    Args:
        rank: its rank.
        code: its exit code, negative for a signal; None if it was still running.
        record: the content of its error file, or None.
        stopped: whether it ended only because the launcher ended it.
        ended: time at which the launcher saw its end, in seconds since 1970; None if unknown.
    """

    rank: int
    code: int | None
    record: dict[str, Any] | None = None
    stopped: bool = False
    ended: float | None = None

    @property
    def time(self) -> float:
        """The time of its error record, else of its end, in seconds since 1970; infinite if unknown."""
        extra, ended = self._extra, float("inf") if self.ended is None else self.ended
        try:
            return float(extra.get("time", extra.get("timestamp", ended)))
        except (TypeError, ValueError):
            return ended

    @property
    def exit_code(self) -> int:
        """Exit code as a shell shows it; an error is 1 as in Python, even if a signal arrived after the error."""
        if self.code is None or (self.record is not None and self.code < 0):
            return 1
        return shell_code(self.code)

    @property
    def message(self) -> str:
        """The first part of the error in one line, or how the process ended."""
        text = self.record.get("message") if self.record is not None else None
        return _first_part(str(text or "")) or ending(self.code)

    @property
    def trace(self) -> str:
        """The traceback; empty if there is none."""
        return str(self._extra.get("py_callstack") or "")

    @property
    def shown(self) -> bool:
        """Whether the process has printed its traceback itself."""
        return bool(self._extra.get("shown"))

    @property
    def missed(self) -> list[int]:
        """The ranks that it waited for without success; empty if they did not cause its error."""
        missed = self._extra.get("missed")
        return [rank for rank in missed if isinstance(rank, int)] if isinstance(missed, list) else []

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The runner's record of its error; empty if there is none."""
        found = self._extra.get("fingerprint")
        return found if isinstance(found, dict) else {}

    @property
    def is_own(self) -> bool:
        """Whether the process failed by itself; a process that was asked to end may have crashed before."""
        return not self.stopped or self.record is not None or -(self.code or 0) in _CRASHES

    @property
    def is_victim(self) -> bool:
        """Whether another process's end caused the failure: it waited for that process, or lost the connection."""
        if self.missed:
            return True
        text = str((self.record or {}).get("message") or "")
        return re.search(_LOST_PEER, text) is not None and re.search(PORT_TAKEN, text) is None

    @property
    def _extra(self) -> dict[str, Any]:
        extra = (self.record or {}).get("extraInfo")
        return extra if isinstance(extra, dict) else {}


def shell_code(code: int) -> int:
    """Exit code as a shell shows it: 128 + n for signal n."""
    return 128 - code if code < 0 else code


def meaning(number: int) -> str:
    """Name of a signal and its usual cause, such as "signal 9 (SIGKILL): probably ..."."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    said = _MEANINGS.get(name)
    return f"signal {number} ({name})" + (f": {said}" if said else "")


def read_record(path: str) -> dict[str, Any] | None:
    """Content of an error file in torch's format, or None if there is no readable one."""
    try:
        message = parse_json(read_limited(path).decode(errors="replace"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return message if isinstance(message, dict) else {"message": str(message)}


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The failure that caused the others.

    An independent error precedes that of a process that waited for another one without success or lost its connection;
    otherwise the earlier failure is first. The launcher sees the end of a process with a delay, so a death by a signal
    precedes an error in the same second. Native code aborts a process after its connections broke, so an abort follows
    other errors.
    """
    own = [failure for failure in failures if failure.is_own]

    def order(failure: Failure) -> tuple[bool, float]:
        by_signal = failure.record is None and failure.code is not None and failure.code < 0 and not failure.stopped
        aborted = failure.code == _ABORT and any(other is not failure and not other.is_victim for other in own)
        unseen = float("-inf") if failure.ended is None else failure.ended - _SEEN_LATE
        return failure.is_victim or aborted, unseen if by_signal else failure.time

    return min(own or failures, key=order)


def report(failures: Sequence[Failure], processes: int, first: Failure | None = None, quiet: bool = False) -> None:
    """Write a report of the failure to standard error.

    Args:
        failures: every process that failed.
        processes: number of processes of the run.
        first: the process that failed first, if it is known.
        quiet: print only the traceback of the first.
    """
    first = first or first_failure(failures)
    if first.code == RESUME:
        if not quiet:
            print(_RESUMABLE, file=sys.stderr, flush=True)
        return
    lines = [] if quiet else [_headline(first, processes), *_others(failures, first)]
    if first.trace and not first.shown:
        lines += ["", first.trace.rstrip()]
    if lines:
        print("\n".join(lines), file=sys.stderr, flush=True)


def _headline(first: Failure, processes: int) -> str:
    who = "The script" if processes == 1 else f"Process {first.rank} of {processes} {_part(first)} and"
    how = ending(first.code if first.record is None else first.exit_code)
    shown = f" Its traceback is above:\n  {printable(first.message)}" if first.shown else ""
    return f"accel launch: {who} {how}.{shown}"


def _part(first: Failure) -> str:
    """The description of the first process in the summary: it failed, or waited for others without success."""
    if not first.missed:
        return "failed first"
    named = ", ".join(map(str, first.missed[:_MOST_NAMED])) + (" and others" if len(first.missed) > _MOST_NAMED else "")
    return f"waited without success for process {named}"


def ending(code: int | None) -> str:
    """Description of how a process ended, such as "ended with exit code 1"."""
    if code is None:
        return "did not end"
    return f"was killed by {meaning(-code)}" if code < 0 else f"ended with exit code {code}"


def _first_part(text: str) -> str:
    """The start of an error message: its first line, and the second one if it is indented (an obstacle)."""
    lines = text.strip().splitlines() or [""]
    if lines[0].startswith('File "'):
        # A syntax error, which begins with its file and line.
        return lines[-1][:_LONGEST]
    obstacle = lines[1].strip() if len(lines) > 1 and lines[1].startswith((" ", "\t")) else ""
    first = f"{lines[0]} {obstacle}".rstrip()
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]} ..."


def _others(failures: Sequence[Failure], first: Failure) -> list[str]:
    own = [failure for failure in failures if failure is not first and failure.is_own]
    return [f"  Process {failure.rank} failed too: {printable(failure.message)}" for failure in own]
