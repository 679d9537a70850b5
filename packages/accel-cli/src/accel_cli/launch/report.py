"""Telling how a run ended: which process failed first and why, with its traceback once and last."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from accel_state.exit_codes import RESUME
from accel_state.untrusted import parse_json, read_limited

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
    "SIGKILL": "likely the machine ran out of memory, or somebody killed it; `dmesg` may tell",
    "SIGSEGV": "a crash in native code; the lines above, if any, show where Python was",
    "SIGABRT": "native code gave up, as gloo does when processes disagree about a size; the lines above may tell",
    "SIGBUS": "memory that it had mapped went away: a file was shortened, or /dev/shm is full",
    "SIGFPE": "an arithmetic error in native code",
    "SIGILL": "native code was built for another processor",
    "SIGTERM": "somebody asked it to end, such as a batch system whose time limit was reached",
    "SIGXCPU": "its limit of CPU time was reached",
    "SIGPIPE": "the reader of its output has gone",
}

_LOST_PEER: Final = (
    r"Connection (closed|reset|refused)|Broken pipe|Application timeout caused pair closure|Timed out waiting \d+ms"
    r"|gloo/|NCCL|[Ss]ocket (has )?(timed out|closed)|recvValue failed|Dist(Network|Store|Backend)Error"
    r"|StoreUnreachable|CollectiveError|remote process (has )?exited|failed to connect to .* server"
    r"|wait timeout after \d+ms"
)
"""Pattern of the errors of a process that has lost another one; compiled when there is an error."""

PORT_TAKEN: Final = r"EADDRINUSE|[Aa]ddress already in use|port is in use"
"""Pattern of the errors of a process that could not listen on a port."""

_ABORT: Final = -6

_SEEN_LATE: Final = 1.0
"""Seconds after which the launcher has seen at the latest that a process ended."""

_CRASHES: Final = frozenset(
    int(getattr(signal, name)) for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL") if hasattr(signal, name)
)
"""Signals by which native code ends a process."""

_LONGEST: Final = 400
"""Characters of one rank's error in the summary."""

_MOST_NAMED: Final = 8

_RESUMABLE: Final = (
    f"accel launch: The run was asked to end and saved a checkpoint; start it again to resume (exit code {RESUME})."
)


class Failure(NamedTuple):
    """How one process ended that did not end well.

    Args:
        rank: which one.
        code: its exit code, negative for a signal; None when it was still there.
        record: what it wrote into its error file, or None.
        stopped: whether it only ended because the launcher ended it.
        ended: when the launcher saw that it had ended, in seconds since 1970; None where it did not look.
    """

    rank: int
    code: int | None
    record: dict[str, Any] | None = None
    stopped: bool = False
    ended: float | None = None

    @property
    def time(self) -> float:
        """When it recorded its error, else when it ended, in seconds since 1970; infinite where neither is known."""
        extra, ended = self._extra, float("inf") if self.ended is None else self.ended
        try:
            return float(extra.get("time", extra.get("timestamp", ended)))
        except (TypeError, ValueError):
            return ended

    @property
    def exit_code(self) -> int:
        """Exit code as a shell shows it; an error is 1 as in Python, even if a signal came while the process left."""
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
        """The traceback, empty when there is none."""
        return str(self._extra.get("py_callstack") or "")

    @property
    def shown(self) -> bool:
        """Whether the process has shown its traceback by itself."""
        return bool(self._extra.get("shown"))

    @property
    def missed(self) -> list[int]:
        """The ranks that it waited for in vain; empty when its error does not follow from theirs."""
        missed = self._extra.get("missed")
        return [rank for rank in missed if isinstance(rank, int)] if isinstance(missed, list) else []

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the runner recorded of its error; empty where it recorded none."""
        found = self._extra.get("fingerprint")
        return found if isinstance(found, dict) else {}

    @property
    def is_own(self) -> bool:
        """Whether the process failed by itself; one that was asked to end may have crashed before."""
        return not self.stopped or self.record is not None or -(self.code or 0) in _CRASHES

    @property
    def is_victim(self) -> bool:
        """Whether it follows from the end of another process: that one was missed, or a connection to it broke."""
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
    """Name of a signal and what it usually means, such as "signal 9 (SIGKILL): likely ..."."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    said = _MEANINGS.get(name)
    return f"signal {number} ({name})" + (f": {said}" if said else "")


def read_record(path: str) -> dict[str, Any] | None:
    """Content of an error file in torch's format, or None when there is none that can be read."""
    try:
        message = parse_json(read_limited(path).decode(errors="replace"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return message if isinstance(message, dict) else {"message": str(message)}


def first_failure(failures: Sequence[Failure]) -> Failure:
    """The failure the others followed from.

    An error of its own comes before that of a process that waited for another one in vain or lost its connection, and
    else the order is that of their times. The end of a process is seen some time after it, so that a death by a signal
    comes before an error of the same second. Native code aborts a process whose connections broke, so that an abort
    comes after errors.
    """
    own = [failure for failure in failures if failure.is_own]

    def order(failure: Failure) -> tuple[bool, float]:
        by_signal = failure.record is None and failure.code is not None and failure.code < 0 and not failure.stopped
        aborted = failure.code == _ABORT and any(other is not failure and not other.is_victim for other in own)
        unseen = float("-inf") if failure.ended is None else failure.ended - _SEEN_LATE
        return failure.is_victim or aborted, unseen if by_signal else failure.time

    return min(own or failures, key=order)


def report(failures: Sequence[Failure], processes: int, first: Failure | None = None, quiet: bool = False) -> None:
    """Write to standard error how the run failed.

    Args:
        failures: every process that did not end well.
        processes: number of processes of the run.
        first: the one that failed first, where that is known.
        quiet: leave out all but the traceback of the first.
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
    shown = f" Its traceback is above:\n  {first.message}" if first.shown else ""
    return f"accel launch: {who} {how}.{shown}"


def _part(first: Failure) -> str:
    """What the process that the summary names first did: it failed, or waited for others that did not come."""
    if not first.missed:
        return "failed first"
    named = ", ".join(map(str, first.missed[:_MOST_NAMED])) + (" and others" if len(first.missed) > _MOST_NAMED else "")
    return f"waited in vain for process {named}"


def ending(code: int | None) -> str:
    """How a process ended, such as "ended with exit code 1"."""
    if code is None:
        return "did not end"
    return f"was killed by {meaning(-code)}" if code < 0 else f"ended with exit code {code}"


def _first_part(text: str) -> str:
    """What an error says at first: its first line with an indented one below it, such as the obstacle of our errors."""
    lines = text.strip().splitlines() or [""]
    if lines[0].startswith('File "'):
        # A syntax error, which begins with its place.
        return lines[-1][:_LONGEST]
    obstacle = lines[1].strip() if len(lines) > 1 and lines[1].startswith((" ", "\t")) else ""
    first = f"{lines[0]} {obstacle}".rstrip()
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]} ..."


def _others(failures: Sequence[Failure], first: Failure) -> list[str]:
    own = [failure for failure in failures if failure is not first and failure.is_own]
    return [f"  Process {failure.rank} failed too: {failure.message}" for failure in own]
