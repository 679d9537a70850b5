"""Agreement between all ranks outside training: when one rank fails, all ranks raise.

    barrier = StoreBarrier(process, "save/step-100", "Cannot save the checkpoint step-100.", deadline=600)
    folder = barrier.wait("open", name)      # rank 0's name, once every rank has called wait
    with barrier.reporting():                # an exception in this block is raised on every rank
        write(folder)
    barrier.wait("write", last=True)

The ranks agree through the store of the run, not through a collective. Therefore an agreement works in any thread and
during collectives, a rank that fails reports the failure and continues, and the error names the ranks that are missing
at the deadline. No rank polls: the store answers a request once its key exists. An agreement of W ranks costs each rank
at most 4 requests and rank 0 at most W + 8, including the removal of all keys. A failure costs the failing rank W more.
In a phase in which only some ranks contribute (`only`), each other rank sends one request.

Each `StoreBarrier` is one operation, with the same number on all ranks. A rank that raised before an operation is
reported as missing in it, and takes part in the next one.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary

from accel_ops.groups import Group, members_of
from accel_state import errors
from accel_state.errors import AccelError, CollectiveError, StoreUnreachable
from accel_state.protocol.state import protocol_state
from accel_state.watch.calls import format_ranks

if TYPE_CHECKING:
    from accel_state.current import Process

__all__ = ("StoreBarrier", "all_agree", "first", "raise_on_any_rank")

T = TypeVar("T")

_REPLY_TIMEOUT_S: Final = 10.0
"""Seconds for a request that does not wait for other processes."""

_EXTRA_WAIT_OF_OTHERS_S: Final = 3.0
"""Seconds that the other ranks wait longer than rank 0, which may arrive later; at most half of a deadline.

A store that does not answer takes two seconds more.
"""

_ABSENCE_CHECK_INTERVAL_S: Final = 1.5
"""Seconds between two looks at what absent ranks do; each publishes its status once a second."""

_MAX_FAREWELL_S: Final = 10.0
"""Seconds that rank 0 stays after an operation: its process often hosts the store that the other ranks read."""

_MAX_NAMED_RANKS: Final = 16
_RETRY_PAUSE_S: Final = 0.2
"""Seconds before a request is retried if its connection broke or its answer has no valid signature of a rank."""
_MAX_BROKEN_CONNECTIONS: Final = 3

_SUCCESS_MARK: Final = b"+"
_FAILURE_MARK: Final = b"-"
"""First byte of a rank's entry and of the result; it shows whether a value or a failure follows."""


def first(values: Sequence[str]) -> str:
    """The value of rank 0, which `StoreBarrier.wait` returns by default."""
    return values[0]


class _Operations:
    """The operations of one process over one store.

    Attributes:
        counts: number of operations of each topic.
        failed: keys of failed operations by topic; they remain because late ranks read them.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: defaultdict[str, list[str]] = defaultdict(list)
        self.lock = threading.Lock()


_operations: Final[WeakKeyDictionary[Any, _Operations]] = WeakKeyDictionary()


class StoreBarrier:
    """One operation of all ranks, in phases: no rank leaves a phase before all ranks have completed it.

    Attributes:
        rank: index of this process among the processes that take part.
        gone_on: ranks that had gone on to a later call when the operation ended; at most 16 of them.

    Args:
        process: the `Process` of this rank.
        topic: name of the operation, equal on all ranks. Operations of one topic run one after another.
        failure: first part of the errors, for example "Cannot save the checkpoint step-100."
        deadline: seconds to wait for the other ranks in each phase.
        error: class of the errors that the barrier itself raises.
        remedy: last part of the errors when another rank failed.
        group: a process group, a one-dimensional DeviceMesh, or the name of a mesh axis of the run. Only its processes
            take part; by default all processes do. In a group, "rank 0" means its first process.

    Raises:
        SettingError: there is no such group, or this process is not in it.
    """

    def __init__(
        self,
        process: Process,
        topic: str,
        failure: str,
        deadline: float = 600.0,
        error: type[AccelError] = CollectiveError,
        remedy: str = "See the error of that process.",
        group: Group = None,
    ) -> None:
        self._ranks = members_of(group, "StoreBarrier", process).ranks
        self.rank, self._world_size = self._ranks.index(process.rank), len(self._ranks)
        if group is not None:
            topic = f"{topic}/of ranks {','.join(map(str, self._ranks))}"
        self._topic, self._failed, self._deadline = topic, failure, deadline
        self._error, self._remedy = error, remedy
        self._later = min(_EXTRA_WAIT_OF_OTHERS_S, deadline / 2)
        self._process = process
        # None without other ranks, or if they are only simulated.
        control = process.transport.control() if self._world_size > 1 else None
        self._is_alone = control is None
        if control is not None:
            self._control = control
            self._operations = _operations.setdefault(process.transport.store(), _Operations())
        self._number: int | None = None
        self._index = 0
        self._posted: list[str] = []
        self._collects = False
        self._over = False
        self.gone_on: list[int] = []

    @property
    def has_begun(self) -> bool:
        """Whether a phase has completed, so that every rank is known to take part."""
        return self._index > 0

    def describe(self, failure: str, remedy: str) -> None:
        """Replace the first and the last part of the errors, once all ranks know more about the operation."""
        self._failed, self._remedy = failure, remedy

    def wait(
        self,
        phase: str,
        value: str = "",
        combine: Callable[[Sequence[str]], str] = first,
        *,
        last: bool = False,
        only: Sequence[int] | None = None,
        looks: bool = False,
    ) -> str:
        """Wait until every rank has called this; return the result of `combine` for the values of all ranks.

        Args:
            phase: name of the phase, for errors.
            value: what this rank contributes.
            combine: called on rank 0 with the values in the order of the ranks.
            last: whether the operation ends with this phase.
            only: ranks, in order and including 0, that contribute a value; the others only read the result. All ranks
                pass the same ranks. Not for the first phase, in which a rank notices an operation that it missed.
            looks: whether rank 0 looks at what absent ranks do, and ends the operation if all of them have gone on to a
                later call, see `gone_on`. In a world of more than 16 ranks only the deadline ends it.

        Raises:
            AccelError: a rank failed (`error`, or the class raised there if it is one of `accel_state.errors`), or did
                not call this before the deadline (`error`).
        """
        if self._is_alone:
            return combine([value] * (self._world_size if only is None else len(only)))
        ranks = [rank for rank in (range(self._world_size) if only is None else only) if rank]
        try:
            with self._store_named():
                answer = self._wait(phase, value, combine, ranks, looks)
                if last:
                    self.leave()
                return answer
        except BaseException as error:
            # An error of `combine`, or an interrupt; `fail` does not report a failure that all ranks already know.
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Raise this error on every other rank, in its current or next `wait` of this operation; raises nothing here.

        Returns when the other ranks have received it, or after ten seconds.
        """
        if self._is_alone or self._over:
            return
        try:
            self._take_number()
            failure = {**_failure(error), "rank": self.rank}
            result = None
            while result is None:
                result = self._tell(failure)
            self._leave(result)
        except AccelError:
            # The process that hosts the store has ended; the other ranks notice that themselves.
            self._over = True

    def leave(self) -> None:
        """End an operation after all its phases have succeeded; call it on every rank, or pass `last=True` to `wait`.

        The process that hosts the store waits until the other ranks have the last result; rank 0 removes the keys.
        """
        if not self._is_alone and not self._over:
            self._leave()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report any exception of the block to the other ranks."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def check(self) -> None:
        """Raise the failure that another rank has reported in this operation, if there is one; does not wait.

        Raises:
            AccelError: another rank has failed.
        """
        if self._is_alone or self._over:
            return
        try:
            self._take_number()
            result = self._result()
        except StoreUnreachable:
            return
        if result is not None and result.startswith(_FAILURE_MARK):
            self._heed(result)

    # ------------------------------------------------------------------ one phase

    def _wait(
        self,
        phase: str,
        value: str,
        combine: Callable[[Sequence[str]], str],
        ranks: Sequence[int],
        looks: bool,
    ) -> str:
        until = time.monotonic() + self._deadline + (self._later if self.rank else 0.0)
        self._take_number()
        while True:
            if self.rank == 0:
                with self._watching(phase, ranks) if looks else nullcontext():
                    result = self._collect(value, combine, until, phase, ranks)
            else:
                result = self._contribute(value, until, phase, ranks)
            if result.startswith(_SUCCESS_MARK):
                self._index, self._collects = self._index + 1, False
                return result[1:].decode()
            self._heed(result)

    def _collect(
        self,
        value: str,
        combine: Callable[[Sequence[str]], str],
        until: float,
        phase: str,
        ranks: Sequence[int],
    ) -> bytes:
        """Combine the values of all ranks on rank 0, and publish the result or the first failure."""
        result = self._result()
        if result is not None:
            return result
        self._collects = True
        posts = [self._post(rank) for rank in ranks]
        self._posted += posts
        entries = self._receive(posts, until) if posts else {}
        if len(entries) < len(posts):
            absent = self._absent(ranks)
            if absent:
                return self._missed(absent, phase)
            # A key may have an entry without a valid signature.
            entries = self._control.get_many(posts, _REPLY_TIMEOUT_S)
            missing = [rank for rank, post in zip(ranks, posts, strict=True) if post not in entries]
            if missing:
                return self._missed(missing, phase)
        if not all(post.startswith(_SUCCESS_MARK) for post in entries.values()):
            # A failed rank has filled the missing entries with marks.
            return self._receive([self._key()], until)[self._key()]
        try:
            answer = combine([value, *(entries[post][1:].decode() for post in posts)])
        except AccelError as error:
            failure = {**_failure(error), "rank": None}
            self._control.compare_set(self._key(), _FAILURE_MARK + json.dumps(failure).encode(), _REPLY_TIMEOUT_S)
            self._leave(failure)
            raise
        return self._control.compare_set(self._key(), _SUCCESS_MARK + answer.encode(), _REPLY_TIMEOUT_S)

    def _contribute(self, value: str, until: float, phase: str, ranks: Sequence[int]) -> bytes:
        """Write the value of this rank if it is one of `ranks`, and wait for the result."""
        if self.rank in ranks:
            self._control.set(self._post(self.rank), _SUCCESS_MARK + value.encode(), _REPLY_TIMEOUT_S)
        results = self._receive([self._key()], until)
        # Without an answer, rank 0 is missing too.
        return results.get(self._key()) or self._missed([0, *self._absent(ranks)], phase)

    @contextmanager
    def _watching(self, phase: str, ranks: Sequence[int]) -> Iterator[None]:
        """A block in which a thread ends the operation once all absent ranks have gone on to a later call."""
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(phase, ranks, done), name="accel-absent", daemon=True)
        # Without a thread, the deadline ends the operation.
        with suppress(RuntimeError):
            thread.start()
        try:
            yield
        finally:
            done.set()

    def _watch(self, phase: str, ranks: Sequence[int], done: threading.Event) -> None:
        from accel_state.watch.report import ranks_gone_on

        monitor, own = protocol_state(self._process.transport).monitor, self._ranks[0]
        before = monitor.world()
        while monitor.always_reads and not done.wait(_ABSENCE_CHECK_INTERVAL_S):
            monitor.request_stacks()
            world = monitor.world()
            gone = {self._ranks.index(rank) for rank in ranks_gone_on(world, own, before) if rank in self._ranks}
            before = world
            with suppress(StoreUnreachable):
                if gone and gone.issuperset(absent := self._absent(ranks)) and absent and not done.is_set():
                    self._missed(absent, phase, gone_on=True)
                    # Rank 0 waits for all entries, so fill the missing ones.
                    for rank in absent:
                        self._control.compare_set(self._post(rank), _FAILURE_MARK, _REPLY_TIMEOUT_S)
                    return

    def _missed(self, missing: list[int], phase: str, gone_on: bool = False) -> bytes:
        """Publish the missing ranks, and return the valid result, which another rank may have published before."""
        named = missing[:_MAX_NAMED_RANKS]
        failure = {
            "missing": named,
            "phase": phase,
            "seconds": self._deadline,
            "more": len(missing) > len(named),
            "gone on": gone_on,
        }
        return self._control.compare_set(self._key(), _FAILURE_MARK + json.dumps(failure).encode(), _REPLY_TIMEOUT_S)

    def _absent(self, ranks: Sequence[int]) -> list[int]:
        """The first few of `ranks` that have written no entry in this phase."""
        from accel_state.transport.control import find_absent

        posts = [self._post(rank) for rank in ranks]
        absent = find_absent(lambda keys: self._control.check(keys, _REPLY_TIMEOUT_S), posts, _MAX_NAMED_RANKS)
        return [ranks[index] for index in absent]

    def _receive(self, keys: list[str], until: float) -> dict[str, bytes]:
        """The values of the keys as soon as all exist; at the deadline, those that exist."""
        breaks = 0
        while True:
            left = until - time.monotonic()
            try:
                values = self._control.receive(keys, max(left, 0.0))
                if len(values) == len(keys) or left <= 0:
                    return values
                breaks = 0
            except StoreUnreachable as error:
                # A broken connection means that the host is gone; a silent one may recover.
                breaks += error.__cause__ is not None
                if left <= 0 or breaks == _MAX_BROKEN_CONNECTIONS:
                    raise
            time.sleep(max(min(_RETRY_PAUSE_S, until - time.monotonic()), 0.0))

    def _result(self) -> bytes | None:
        """The result of the current phase; None if there is none yet."""
        key = self._key()
        return self._control.get_many([key], _REPLY_TIMEOUT_S).get(key)

    def _take_number(self) -> None:
        with self._operations.lock:
            if self._number is None:
                self._number = self._operations.counts[self._topic]
                self._operations.counts[self._topic] += 1

    def _heed(self, result: bytes) -> None:
        """Raise a failure. If the other ranks ended that operation without this rank, use the next number instead."""
        failure = json.loads(result[1:])
        if self._is_skipped(failure):
            return
        self._leave(failure)
        raise self._described(failure)

    def _is_skipped(self, failure: Mapping[str, Any]) -> bool:
        """Whether an operation failed because this rank was missing; if so, use the next number."""
        if self._index or self._collects or self.rank not in failure.get("missing", ()):
            return False
        if self.rank == 0:
            self._operations.failed[self._topic] += [*self._posts(), self._key()]
        self._number = None
        self._take_number()
        return True

    def _tell(self, failure: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Publish a failure, and return the first failure that was published; None if the caller must try again."""
        own = _FAILURE_MARK + json.dumps(failure).encode()
        stored = self._control.compare_set(self._key(), own, _REPLY_TIMEOUT_S)
        if stored.startswith(_SUCCESS_MARK):
            # This phase has already succeeded; the next one reports the failure.
            self._index += 1
            return None
        if stored == own and (self.rank or self._collects):
            # Rank 0 waits for all entries, so fill the missing ones.
            for post in self._posts():
                self._control.compare_set(post, _FAILURE_MARK, _REPLY_TIMEOUT_S)
        counts: Mapping[str, Any] = json.loads(stored[1:])
        return None if self._is_skipped(counts) else counts

    @property
    def _operation(self) -> str:
        return f"accel/agreement/{self._topic}/{self._number}"

    def _key(self) -> str:
        """The key of the result of the current phase."""
        return f"{self._operation}/{self._index}"

    def _post(self, rank: int) -> str:
        return f"{self._key()}/{rank}"

    def _posts(self) -> list[str]:
        """The keys of the entries of all ranks except rank 0, which writes none."""
        return [self._post(rank) for rank in range(1, self._world_size)]

    # ------------------------------------------------------------------ ending

    def _leave(self, failure: Mapping[str, Any] | None = None) -> None:
        """Confirm that this rank has the final result; rank 0 waits for all confirmations and removes the keys."""
        self._over = True
        gone = set(failure.get("missing", ())) if failure else set()
        hearers = sum(rank not in gone for rank in range(1, self._world_size))
        count, all_heard = f"{self._operation}/heard", f"{self._operation}/all heard"
        try:
            if self.rank == 0:
                heard = not hearers or bool(self._control.receive([all_heard], _MAX_FAREWELL_S))
                self._clean([count, all_heard], heard and failure is None)
                return
            if self.rank not in gone and self._control.add(count, _REPLY_TIMEOUT_S) == hearers:
                self._control.set(all_heard, b"", _REPLY_TIMEOUT_S)
        except StoreUnreachable:
            # The agreement remains valid; a process has ended before it confirmed.
            return

    def _clean(self, marks: list[str], well: bool) -> None:
        """Remove the keys of this operation; a later operation removes those of a failed one."""
        phases = [f"{self._operation}/{index}" for index in range(self._index + (not well))]
        # A rank that fails marks the entries of all ranks.
        marked = [f"{phase}/{rank}" for phase in phases for rank in range(1, self._world_size)]
        later = self._operations.failed[self._topic]
        later += [*(self._posted if well else marked), *phases, *marks]
        if well:
            self._control.delete(later, _MAX_FAREWELL_S)
            later.clear()

    def _described(self, failure: Mapping[str, Any]) -> AccelError:
        if "missing" in failure:
            absent = [self._ranks[rank] for rank in failure["missing"]]
            missing = ", ".join(map(str, absent)) + (" and others" if failure.get("more") else "")
            if failure["gone on"]:
                self.gone_on = absent
                obstacle = f"Process {missing} has ended, or is in a later call, and cannot come."
                remedy = "Call this on every process, not in a block for one of them."
            else:
                obstacle = f"Process {missing} did not arrive within {failure['seconds']:g} s."
                remedy = "Check what that process does. Call this on every process, or set a longer deadline."
            late = self._error(f"{self._failed} ({failure['phase']})", f"{obstacle} {self._everyone()}", remedy)
            return _following(late, absent)
        # If no rank is named, the values of the ranks differ.
        who = "" if failure["rank"] is None else f"Process {self._ranks[failure['rank']]} failed: "
        kind = getattr(errors, failure["type"], None)
        if failure["parts"] is not None and isinstance(kind, type) and issubclass(kind, AccelError):
            failed, obstacle, remedy = failure["parts"]
            error = kind(failed, f"{who}{obstacle}", remedy)
        else:
            error = self._error(self._failed, f"{who}{failure['type']}: {failure['text']}", self._remedy)
        return error if failure["rank"] is None else _following(error, [self._ranks[failure["rank"]]])

    def _everyone(self) -> str:
        """The last known position of every process."""
        # Imported only for an error, because the modules of a report take a fifth of this package's import time.
        from accel_state.watch.report import describe_all_ranks

        process = self._process
        return describe_all_ranks(protocol_state(process.transport).monitor, process.rank, process.world_size)

    @contextmanager
    def _store_named(self) -> Iterator[None]:
        """Turn an unreachable store into an error of this operation."""
        try:
            yield
        except StoreUnreachable as error:
            self._over = True
            raise self._error(
                self._failed,
                f"The store of the run does not answer, so the process that hosts it may be gone: {error.obstacle} "
                f"{self._everyone()}",
                "Check the output of the other processes, and restart the run.",
            ) from error


def _following(error: AccelError, ranks: list[int]) -> AccelError:
    """The error with an attribute for the launcher's report: the ranks that caused it."""
    from accel_state.watch.report import MISSED

    setattr(error, MISSED, ranks)
    return error


def raise_on_any_rank(
    process: Process,
    topic: str,
    work: Callable[[], T],
    failure: str,
    deadline: float = 600.0,
    error: type[AccelError] = CollectiveError,
    *,
    group: Group = None,
) -> T:
    """Run `work` on every rank; an exception on one rank raises on all.

    Args:
        process: the `Process` of this rank.
        topic: name of the work, equal on all ranks.
        work: function that runs on each rank; a rank on which it raises gets its own exception.
        failure: first part of the error when a rank failed or is missing.
        deadline: seconds to wait for the other ranks.
        error: class of that error.
        group: a process group or a mesh axis; only its processes take part, see `gather`.

    Returns:
        The result of `work` on this rank.

    Raises:
        AccelError: it failed on another rank, or a rank is missing at the deadline.

    Example:
        >>> from accel_state import current
        >>> raise_on_any_rank(current.process_or_start(), "check", lambda: 3, "Cannot check the files.")
        3
    """
    barrier = StoreBarrier(process, topic, failure, deadline, error, group=group)
    with barrier.reporting():
        result = work()
    barrier.wait("done", last=True)
    return result


def all_agree(
    process: Process,
    topic: str,
    value: str,
    failure: str,
    deadline: float = 600.0,
    error: type[AccelError] = CollectiveError,
    *,
    group: Group = None,
) -> str:
    """Return the value that all ranks pass; if the values differ, all ranks raise.

    Args:
        process: the `Process` of this rank.
        topic: name of the value, equal on all ranks.
        value: the value of this rank.
        failure: first part of the error.
        deadline: seconds to wait for the other ranks.
        error: class of that error.
        group: a process group or a mesh axis; only its processes take part, see `gather`.

    Raises:
        AccelError: the values differ, or a rank is missing at the deadline.

    Example:
        >>> from accel_state import current
        >>> all_agree(current.process_or_start(), "data", "train-7", "Cannot begin the epoch.")
        'train-7'
    """

    members = members_of(group, "all_agree", process).ranks

    def same(values: Sequence[str]) -> str:
        owners: dict[str, list[int]] = {}
        for rank, value in zip(members, values, strict=True):
            owners.setdefault(value, []).append(rank)
        if len(owners) > 1:
            shown = "; ".join(f"{value!r} on {format_ranks(who)}" for value, who in owners.items())
            raise error(
                failure, f"The values of the processes differ: {shown}.", "Pass the same value on every process."
            )
        return values[0]

    return StoreBarrier(process, topic, failure, deadline, error, group=group).wait("value", value, same, last=True)


def _failure(error: BaseException) -> dict[str, Any]:
    """An error in the form in which the other ranks receive it."""
    parts = [error.failure, error.obstacle, error.remedy] if isinstance(error, AccelError) else None
    return {"type": type(error).__name__, "text": str(error), "parts": parts}
