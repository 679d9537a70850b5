"""Why a run failed, and whether it is restarted: the root cause, its fingerprint, and the restart policy.

The processes record their errors (`accel_cli.launch.failure_record`). The launcher finds the error that caused the
others, and compares it with earlier failures. A failure that repeats without progress, or with the same samples, would
probably occur a third time, so the policy stops. A failure that does not depend on the script, such as a killed
process, a lost node or a port in use, is worth another attempt, within the budget of restarts and after an increasing
pause.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from accel_cli.launch.report import PORT_TAKEN, Failure, ending, first_failure
from accel_state.proc import CGROUP, numbers_of, oom_kills
from accel_state.untrusted import printable
from accel_state.watch.goodput import append_line

if TYPE_CHECKING:
    from accel_cli.launch.interface import LaunchPlan

__all__ = (
    "FAILURES",
    "Cause",
    "Decision",
    "Fingerprint",
    "RestartPolicy",
    "Restarts",
    "find_cause",
    "port_taken",
)

FAILURES: Final = "failures.jsonl"
"""File in a run's folder, with one line for each failure."""

Kind = Literal["killed", "outside", "hang", "out of memory", "final", "error"]
"""Kinds of failures. "outside": a lost peer, a port in use or an error of the file system, which time may resolve.
"final": another attempt would end in the same way, because a disk is full, access is refused, the program or its
settings are wrong, or the user interrupted it. "error": any other exception, exit code or crash, or a process that
ended with exit code 0 while others needed it."""

_TRANSIENT: Final = frozenset({"killed", "outside", "hang"})
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


@dataclass(frozen=True)
class Fingerprint:
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


@dataclass(frozen=True)
class Cause:
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


@dataclass(frozen=True)
class Decision:
    """What the launcher does after a failure.

    Args:
        restart: whether it restarts the processes.
        reason: the reason, as part of a sentence.
        pause: seconds until the restart.
    """

    restart: bool
    reason: str
    pause: float = 0.0


# ---------------------------------------------------------------------- the root cause


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
        return replace(cause, fingerprint=replace(cause.fingerprint, samples=tuple(samples[first.rank])))
    return _cause_of_victims(failures, codes, steps)


def port_taken(error: Exception) -> Cause:
    """The cause if processes could not be started because a port is in use."""
    return Cause("outside", None, Fingerprint("port taken"), " ".join(str(error).split()))


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
        return Cause(_kind_of(told), rank, replace(_fingerprint(told, "error", step), step=step), message, victims)
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


@dataclass
class RestartPolicy:
    """Decides after each failure of a run whether it is restarted.

    Args:
        name: "never" or "auto".
        max_restarts: largest number of restarts of the run.

    Example:
        >>> policy = RestartPolicy("auto", max_restarts=20)
        >>> killed = Cause("killed", 1, Fingerprint("SIGKILL", step=40), "was killed")
        >>> policy.decide(killed)
        Decision(restart=True, reason='killed: restart 1 of 20', pause=0.0)
    """

    name: str
    max_restarts: int
    failures: list[Cause] = field(default_factory=list)
    restarts: int = 0
    _without_progress: int = 0

    def decide(self, cause: Cause) -> Decision:
        """Decide what to do after a failure, and remember the failure."""
        stop = self._reason_to_stop(cause)
        reached = max((one.fingerprint.step for one in self.failures), default=-1)
        self._without_progress = 0 if cause.fingerprint.step > reached >= 0 else self._without_progress + 1
        self.failures.append(cause)
        if stop:
            return Decision(False, stop)
        self.restarts += 1
        waits = self._without_progress - (0 if cause.kind == "outside" else 1)
        pause = 0.0 if waits <= 0 else min(2.0 ** (waits - 1), _LONGEST_PAUSE)
        return Decision(True, f"{cause.kind}: restart {self.restarts} of {self.max_restarts}", pause)

    def _reason_to_stop(self, cause: Cause) -> str:
        """The reason why the run is not restarted; empty if it is."""
        if self.name == "never":
            return "restart_policy is never"
        if cause.kind == "out of memory":
            return f"out of memory: the same sizes would need the same memory again; {cause.message}"
        if cause.kind == "final":
            return f"another attempt would end in the same way: {cause.message}"
        again = self._samples_again(cause.fingerprint.samples)
        if again:
            return f"two failures with the same samples: {', '.join(again)}"
        if cause.kind == "hang" and any(one.kind == "hang" for one in self.failures):
            return "it hung for the second time"
        if self._came_again(cause):
            at_hand = f"; samples in use: {', '.join(cause.fingerprint.samples)}" if cause.fingerprint.samples else ""
            return f"the same failure occurred again without progress{at_hand}"
        if self.restarts >= self.max_restarts:
            return f"all {self.max_restarts} restarts are used"
        return ""

    def _samples_again(self, samples: Iterable[str]) -> list[str]:
        before = {sample for one in self.failures for sample in one.fingerprint.samples}
        return [sample for sample in samples if sample in before]

    def _came_again(self, cause: Cause) -> bool:
        """Whether this failure occurred before, and the run has made no progress since then."""
        mine = cause.fingerprint
        alike = [
            one
            for one in self.failures
            if one.kind == cause.kind and one.fingerprint.is_same_place(mine) and mine.step <= one.fingerprint.step
        ]
        if not cause.is_transient:
            return bool(alike)
        exact = mine.step > 0 and cause.kind != "outside"
        return len(alike) >= _PATIENCE or (exact and any(one.fingerprint.step == mine.step for one in alike))


# ---------------------------------------------------------------------- the launcher's side


class Restarts:
    """Records the failures of one launch, and decides about restarts.

    Args:
        plan: the plan of the launch.
        oom_killed: number of processes that the system had killed for lack of memory before the launch.
    """

    def __init__(self, plan: LaunchPlan, oom_killed: int) -> None:
        self._plan = plan
        self._policy = RestartPolicy(plan.restart_policy, plan.max_restarts)
        self._oom_killed = oom_killed
        self._pause = 0.0

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
        attempt, decision = self._policy.restarts, self._policy.decide(cause)
        if asked_to_end:
            decision = Decision(False, "the run was asked to end")
        if folder:
            line = {
                "time": time.time(),
                "attempt": attempt,
                "began": began,
                **asdict(cause),
                "action": "restart" if decision.restart else "stop",
                "reason": decision.reason,
                "pause": decision.pause,
                "decided_after": time.monotonic() - ended,
            }
            append_line(os.path.join(folder, FAILURES), line)
        self._pause = decision.pause
        if self._plan.restart_policy != "never" and not self._plan.quiet:
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
