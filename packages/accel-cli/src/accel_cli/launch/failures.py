"""Why a run failed, and what the launcher does then: the failed processes, the first cause, report and restart policy.

The processes record their errors (`accel_cli.launch.failure_record`). The launcher finds the failure that caused the
others, reports it once, at the end, and compares it with earlier failures. A failure that repeats without progress, or
with the same samples, would probably occur a third time, so the policy stops. A failure that does not depend on the
script, such as a killed process, a lost node or a port in use, is worth another attempt, within the budget of restarts
and after an increasing pause.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from accel_state.exit_codes import RESUME
from accel_state.proc import CGROUP, numbers_of, oom_kills
from accel_state.untrusted import parse_json, printable, read_limited

__all__ = (
    "FAILURES",
    "PORT_TAKEN",
    "Cause",
    "Decision",
    "Failure",
    "Fingerprint",
    "RestartPolicy",
    "ending",
    "find_cause",
    "first_failure",
    "meaning",
    "read_record",
    "report",
    "shell_code",
)

# ---------------------------------------------------------------------- failed processes

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


# ---------------------------------------------------------------------- the report


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


# ---------------------------------------------------------------------- causes

FAILURES: Final = "failures.jsonl"
"""File in a run's folder, with one line for each failure."""

Kind = Literal["killed", "outside", "hang", "out of memory", "final", "error", "data", "numerics", "hardware"]
"""Kinds of failures. "outside": a lost peer, a port in use or an error of the file system, which time may resolve.
"final": another attempt would end in the same way, because a disk is full, access is refused, the program or its
settings are wrong, or the user interrupted it. "error": any other exception, exit code or crash, or a process that
ended with exit code 0 while others needed it. "data", "numerics" and "hardware": a guard of training steps raised its
error, and this is the likely cause."""

_JUDGED: Final[tuple[Kind, ...]] = ("data", "numerics", "hardware")
"""Kinds that an error of a guard names itself."""

_TRANSIENT: Final = frozenset({"killed", "outside", "hang", "hardware"})
"""Kinds that may not occur in another attempt."""

_PATIENCE: Final = 3
"""How often in a row a transient failure may repeat at the same position without progress."""

_LONGEST_PAUSE: Final = 60.0

_OUT_OF_MEMORY: Final = (
    r"out of memory|can't allocate memory|Cannot allocate memory|Unable to allocate|OutOfMemory|MemoryError"
)
_MACHINE: Final = r"(?i)uncorrectable ECC|Xid|device .*(lost|unavailable)|fallen off the bus|NVLink"
_REFUSED: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)
_HICCUPS: Final = (
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.EAGAIN, errno.EBUSY, errno.ENODEV, errno.ENXIO),
    *(errno.ECONNRESET, errno.ECONNREFUSED, errno.EPIPE, errno.EHOSTUNREACH, errno.ENETUNREACH),
)
_PROGRAM: Final = (
    "SyntaxError",
    "ImportError",
    "NameError",
    "SettingError",
    "UnknownKind",
    "NotOffered",
    "PluginError",
)

_RULES: Final[tuple[tuple[Kind, Sequence[str], Sequence[int], str], ...]] = (
    ("final", ("KeyboardInterrupt",), (), ""),
    ("out of memory", (), (errno.ENOMEM,), _OUT_OF_MEMORY),
    ("final", (), (), "No space left on device"),
    ("outside", (), (errno.EADDRINUSE,), PORT_TAKEN),
    ("final", (), _REFUSED, ""),
    ("outside", ("ConnectionError",), _HICCUPS, _MACHINE),
    ("killed", (), (), r"is killed by signal: (Killed|Terminated)"),
    ("final", _PROGRAM, (), ""),
)
"""How an error is classified: the first rule with a class of the error, an errno, or a text of it or of its causes."""

_KILLS: Final = (
    {int(signal.SIGKILL), int(signal.SIGTERM), int(getattr(signal, "SIGHUP", 0))} if os.name == "posix" else {9}
)


class Fingerprint(NamedTuple):
    """Identifies a failure, so that two failures can be compared.

    Args:
        type: type of the exception, the name of a signal, or "exit code 3".
        frame: line of the script that raised it, such as "train.py:41 in main"; empty if it is unknown.
        step: number of completed steps of the run, over all restarts.
        samples: ids of the samples that were read or trained on; empty if they are unknown.
    """

    type: str
    frame: str = ""
    step: int = 0
    samples: tuple[str, ...] = ()

    def is_same_place(self, other: Fingerprint) -> bool:
        """Whether both failed in the same way at the same line."""
        return (self.type, self.frame) == (other.type, other.frame)


class Cause(NamedTuple):
    """The failure that caused the other failures of an attempt.

    Args:
        kind: kind of the failure.
        rank: the process, or None if no process of the run is the cause.
        fingerprint: the values for comparison with other failures.
        message: the error or the end of the process, in one line.
        victims: ranks that failed because of it.
    """

    kind: Kind
    rank: int | None
    fingerprint: Fingerprint
    message: str
    victims: tuple[int, ...] = ()

    @property
    def is_transient(self) -> bool:
        """Whether the failure may not occur in another attempt."""
        return self.kind in _TRANSIENT


class Decision(NamedTuple):
    """What the launcher does after a failure.

    Args:
        restart: whether it restarts the processes.
        reason: the reason, as part of a sentence.
        pause: seconds until the restart.
    """

    restart: bool
    reason: str
    pause: float = 0.0


def find_cause(
    failures: Sequence[Failure],
    codes: Mapping[int, int | None],
    steps: Mapping[int, int],
    samples: Mapping[int, Sequence[str]],
    held_up_by: Sequence[int] = (),
    hang: str = "",
    oom_killed: bool = False,
) -> Cause:
    """Find the root cause of a failed attempt.

    Args:
        failures: every process that failed, at least one.
        codes: exit codes of all processes by rank, before the launcher ended any; None for a running process.
        steps: number of completed steps of each process.
        samples: ids of the samples that each process has read last, after a restart.
        held_up_by: with `hang`, ranks that the others waited for.
        hang: the message for a run that was ended because it hung, or empty.
        oom_killed: whether the system killed a process of this machine because its memory was used up.
    """
    if hang:
        late = held_up_by[0] if len(held_up_by) == 1 else None
        step = steps.get(late, 0) if late is not None else max(steps.values(), default=0)
        others = tuple(rank for rank in sorted(codes) if late is not None and rank != late)
        return Cause("hang", late, Fingerprint("hang", step=step), hang, others)
    first = first_failure(failures)
    victims = tuple(sorted(one.rank for one in failures if one is not first and (one.is_victim or one.stopped)))
    if not first.is_victim:
        cause = _cause_of(first, steps.get(first.rank, 0), victims, oom_killed)
        if first.record is not None or not samples.get(first.rank):
            return cause
        return cause._replace(fingerprint=cause.fingerprint._replace(samples=tuple(samples[first.rank])))
    return _cause_of_victims(failures, codes, steps)


def _cause_of_victims(failures: Sequence[Failure], codes: Mapping[int, int | None], steps: Mapping[int, int]) -> Cause:
    """The cause if every failed process had lost another one."""
    own = [one for one in failures if one.is_victim]
    hurt = {one.rank for one in own}
    victims = tuple(sorted(hurt))
    missed = [rank for one in own for rank in one.missed if rank not in hurt]
    first = min(own, key=lambda one: one.time)
    message = first.message
    blamed = {rank for one in own for rank in one.missed}
    sockets = [one for one in own if not one.missed and _is_of_a_socket(one) and (len(own) == 1 or one.rank in blamed)]
    if not missed and sockets:
        # The script's own connection broke, not one to another process of the run.
        root = min(sockets, key=lambda one: one.time)
        others = tuple(sorted(hurt - {root.rank}))
        return Cause("outside", root.rank, _fingerprint(root, "lost peer", 0), root.message, others)
    if not missed:
        # A process that ended with exit code 0 while the others needed it, else one that was still running elsewhere.
        rest = [rank for rank in sorted(codes) if rank not in hurt]
        gone = [rank for rank in rest if codes[rank] == 0]
        missed = gone if len(gone) == 1 else rest
        if len(missed) != 1:
            # The network or another machine failed.
            return Cause("outside", None, _fingerprint(first, "lost peer", 0), message, victims)
    rank = max(sorted(set(missed)), key=missed.count)
    step = steps.get(rank, 0)
    if codes.get(rank, -1) == 0:
        return Cause("error", rank, Fingerprint("exit code 0", step=step), "ended with exit code 0 early", victims)
    told = next((one for one in own if f"Process {rank} failed: " in str((one.record or {}).get("message"))), None)
    if told is not None:
        # Another process received the error of this process, which is still ending or could not record it.
        return Cause(_kind_of(told), rank, _fingerprint(told, "error", step)._replace(step=step), message, victims)
    if rank in codes and codes[rank] is None:
        return Cause("hang", rank, Fingerprint("missed", step=step), message, victims)
    return Cause("outside", rank, Fingerprint("lost peer", step=step), message, victims)


def _is_of_a_socket(failure: Failure) -> bool:
    """Whether an error of Python's sockets ended a process; communication libraries raise other errors."""
    causes = failure.fingerprint.get("causes") or [{}]
    return "OSError" in (causes[0].get("types") or ())


def _cause_of(first: Failure, step: int, victims: tuple[int, ...], oom_killed: bool) -> Cause:
    if first.record is None:
        return _cause_of_code(first, step, victims, oom_killed)
    kind = _kind_of(first)
    numbers = f" ({_memory_numbers()})" if kind == "out of memory" else ""
    return Cause(kind, first.rank, _fingerprint(first, "error", step), first.message + numbers, victims)


def _cause_of_code(first: Failure, step: int, victims: tuple[int, ...], oom_killed: bool) -> Cause:
    """The cause of a failure with only an exit code."""
    code = first.code or 0
    # A shell reports that a signal killed its program as exit code 128 plus the signal's number.
    number = -code if code < 0 else code - 128 if code > 128 else 0
    try:
        name = signal.Signals(number).name
    except ValueError:
        name, number = f"exit code {code}", 0
    kind: Kind = "killed" if number in _KILLS else "final" if number == signal.SIGINT else "error"
    if oom_killed and number == signal.SIGKILL:
        kind = "out of memory"
    text = ending(first.code) + (f" ({_memory_numbers()})" if kind == "out of memory" else "")
    return Cause(kind, first.rank, Fingerprint(name, step=step), text, victims)


def _fingerprint(failure: Failure, fallback: str, step: int) -> Fingerprint:
    found = failure.fingerprint
    samples = found.get("samples")
    given = found.get("step")
    return Fingerprint(
        str(found.get("type") or failure.message.partition(":")[0] or fallback),
        str(found.get("frame") or ""),
        given if isinstance(given, int) and given >= 0 else step,
        tuple(map(str, samples)) if isinstance(samples, list) else (),
    )


def _kind_of(first: Failure) -> Kind:
    """The kind of failure of an error, from its classes, and from the numbers and texts of its causes too."""
    judged = first.fingerprint.get("kind")
    if judged in _JUDGED:
        return next(kind for kind in _JUDGED if kind == judged)
    causes = [one for one in first.fingerprint.get("causes") or () if isinstance(one, dict)]
    names = {str(name) for one in causes[:1] for name in one.get("types") or ()}
    numbers = {one.get("errno") for one in causes}
    texts = [str((first.record or {}).get("message")), *(f"{one.get('types')} {one.get('text')}" for one in causes)]
    text = "\n".join(texts)
    return next(
        (
            kind
            for kind, classes, errnos, pattern in _RULES
            if not names.isdisjoint(classes) or not numbers.isdisjoint(errnos) or (pattern and re.search(pattern, text))
        ),
        "error",
    )


# ---------------------------------------------------------------------- memory


def _memory_numbers() -> str:
    limit, peak = (_first_line(os.path.join(CGROUP, name)) for name in ("memory.max", "memory.peak"))
    total = numbers_of("/proc/meminfo").get("MemTotal:", 0) * 1024
    known = {"limit": limit, "most used": peak, "memory of the machine": str(total or "")}
    return ", ".join(f"{name} {int(text) / 2**30:.2f} GiB" for name, text in known.items() if text.isdecimal())


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.readline().strip()
    except (OSError, ValueError):
        return ""


# ---------------------------------------------------------------------- the policy


class RestartPolicy:
    """Records the failures of one launch, and decides after each whether the processes are restarted.

    Args:
        name: "never" or "auto".
        max_restarts: largest number of restarts of the run.
        oom_killed: number of processes that the system had killed for lack of memory before the launch.
        quiet: print no decisions.

    Example:
        >>> policy = RestartPolicy("auto", max_restarts=20)
        >>> killed = Cause("killed", 1, Fingerprint("SIGKILL", step=40), "was killed")
        >>> policy.decide(killed)
        Decision(restart=True, reason='killed: restart 1 of 20', pause=0.0)
    """

    def __init__(self, name: str, max_restarts: int, oom_killed: int = 0, quiet: bool = False) -> None:
        self._name, self._max_restarts = name, max_restarts
        self._oom_killed, self._quiet = oom_killed, quiet
        self._failures: list[Cause] = []
        self._restarts = self._without_progress = 0
        self._pause = 0.0

    def decide(self, cause: Cause) -> Decision:
        """Decide what to do after a failure, and remember the failure."""
        stop = self._reason_to_stop(cause)
        reached = max((one.fingerprint.step for one in self._failures), default=-1)
        self._without_progress = 0 if cause.fingerprint.step > reached >= 0 else self._without_progress + 1
        self._failures.append(cause)
        if stop:
            return Decision(False, stop)
        self._restarts += 1
        waits = self._without_progress - (0 if cause.kind == "outside" else 1)
        pause = 0.0 if waits <= 0 else min(2.0 ** (waits - 1), _LONGEST_PAUSE)
        return Decision(True, f"{cause.kind}: restart {self._restarts} of {self._max_restarts}", pause)

    def _reason_to_stop(self, cause: Cause) -> str:
        """The reason why the run is not restarted; empty if it is."""
        if self._name == "never":
            return "restart_policy is never"
        if cause.kind == "out of memory":
            return f"out of memory: the same sizes would need the same memory again; {cause.message}"
        if cause.kind == "final":
            return f"another attempt would end in the same way: {cause.message}"
        # The numerics fail at the same samples again because the order repeats, not because of them.
        again = [] if cause.kind == "numerics" else self._samples_again(cause.fingerprint.samples)
        if again:
            return f"two failures with the same samples: {', '.join(again)}"
        if cause.kind == "hang" and any(one.kind == "hang" for one in self._failures):
            return "it hung for the second time"
        if self._came_again(cause):
            at_hand = f"; samples in use: {', '.join(cause.fingerprint.samples)}" if cause.fingerprint.samples else ""
            return f"the same failure occurred again without progress{at_hand}"
        if self._restarts >= self._max_restarts:
            return f"all {self._max_restarts} restarts are used"
        return ""

    def _samples_again(self, samples: Iterable[str]) -> list[str]:
        before = {sample for one in self._failures for sample in one.fingerprint.samples}
        return [sample for sample in samples if sample in before]

    def _came_again(self, cause: Cause) -> bool:
        """Whether this failure occurred before, and the run has made no progress since then."""
        mine = cause.fingerprint
        alike = [
            one
            for one in self._failures
            if one.kind == cause.kind and one.fingerprint.is_same_place(mine) and mine.step <= one.fingerprint.step
        ]
        if not cause.is_transient:
            return bool(alike)
        exact = mine.step > 0 and cause.kind != "outside"
        return len(alike) >= _PATIENCE or (exact and any(one.fingerprint.step == mine.step for one in alike))

    def killed_for_memory(self) -> bool:
        """Whether the system has killed a process for lack of memory since the last call."""
        before, self._oom_killed = self._oom_killed, oom_kills()
        return self._oom_killed > before

    def after(self, cause: Cause, began: float, ended: float, folder: str, asked_to_end: bool) -> bool:
        """Decide whether the processes of a failed attempt are restarted.

        Args:
            cause: the root cause of the failure.
            began: start of the attempt, in seconds since 1970.
            ended: when its last process had ended, by the monotonic clock.
            folder: the folder of the run; empty if it has none.
            asked_to_end: whether the launcher was asked to end the run, possibly after a process had failed.
        """
        attempt, decision = self._restarts, self.decide(cause)
        if asked_to_end:
            decision = Decision(False, "the run was asked to end")
        if folder:
            line = {
                "time": time.time(),
                "attempt": attempt,
                "began": began,
                **cause._asdict(),
                "fingerprint": cause.fingerprint._asdict(),
                "action": "restart" if decision.restart else "stop",
                "reason": decision.reason,
                "pause": decision.pause,
                "decided_after": time.monotonic() - ended,
            }
            from accel_state.watch.goodput import append_line

            append_line(os.path.join(folder, FAILURES), line)
        self._pause = decision.pause
        if self._name != "never" and not self._quiet:
            later = f" in {decision.pause:g} s" if decision.pause else ""
            what = f"Starting again{later}" if decision.restart else "Not started again"
            print(printable(f"accel launch: {what}: {decision.reason}."), file=sys.stderr, flush=True)
        return decision.restart

    def wait(self, next_signals: Callable[[float], list[int]], ending: Sequence[int]) -> int | None:
        """Wait until the restart; return the signal that ended the wait, or None.

        Args:
            next_signals: waits for at most a number of seconds, and returns the signals that have arrived.
            ending: the signals that end the wait.
        """
        deadline = time.monotonic() + self._pause
        while True:
            for number in next_signals(max(deadline - time.monotonic(), 0.0)):
                if number in ending:
                    print(f"accel launch: ended by {signal.Signals(number).name}.", file=sys.stderr, flush=True)
                    return number
            if time.monotonic() >= deadline:
                return None
