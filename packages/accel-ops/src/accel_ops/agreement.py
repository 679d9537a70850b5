"""One agreement for all that processes do together outside of training: any rank fails, all raise.

    barrier = StoreBarrier(process, "save/step-100", "Cannot save the checkpoint step-100.", deadline=600)
    folder = barrier.wait("open", name)      # rank 0's name, once every rank has called this
    with barrier.reporting():                # what is raised here is raised on every rank
        write(folder)
    barrier.wait("write", last=True)

The ranks meet in the store of the run, not in a collective: one that fails says so and goes on, and one that is missing
is named when the deadline passes. Each rank posts once for each phase; rank 0 reads all posts with two requests and
posts one result. So a phase costs O(world size) requests in all.

Each `StoreBarrier` is one operation, with a number that is the same on all ranks. A rank that did not take part in an
operation, because it raised before, finds itself named as missing there, and takes the next number.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from weakref import WeakKeyDictionary

from accel_state import errors
from accel_state.errors import AccelError, CollectiveError, StoreUnreachable
from accel_state.hang_report.failure import everyone
from accel_state.protocol.call import exchange_of

if TYPE_CHECKING:
    from accel_state.identity import Process
    from accel_state.transport.control import ControlStore

__all__ = ("StoreBarrier", "first", "raise_on_any_rank")

T = TypeVar("T")

_ANSWER: Final = 10.0
"""Seconds for a request that does not wait for other processes."""

_LATER: Final = 5.0
"""Seconds by which the other ranks outwait rank 0, whose deadline began when it came; at most half a deadline."""

_FAREWELL: Final = 10.0
"""Seconds that rank 0 stays after the end of an operation: often its process hosts the store that the others read."""

_MOST_NAMED: Final = 16
_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.05
_LOOKS_PER_SECOND: Final = 2000
"""How often all ranks together look for a result at most, however many they are: one process serves the store."""
_MOST_BREAKS: Final = 3


def first(values: Sequence[str]) -> str:
    """The value of rank 0; what `StoreBarrier.wait` returns by default."""
    return values[0]


class _Connection:
    """What one process keeps for the operations over one store."""

    def __init__(self, control: ControlStore) -> None:
        self.control = control
        self.operations: Counter[str] = Counter()
        self.failed: defaultdict[str, list[str]] = defaultdict(list)
        self.lock = threading.Lock()


_connections: Final[WeakKeyDictionary[Any, _Connection]] = WeakKeyDictionary()


def _connection_of(process: Process) -> _Connection | None:
    """The way to the other ranks; None where there are no others, or simulated ones that say what this one says."""
    store: Any = process.transport.store()
    if store is None:
        return None
    known = _connections.get(store)
    if known is None:
        control = process.transport.control()
        assert control is not None
        known = _connections[store] = _Connection(control)
    return known


class StoreBarrier:
    """One operation of all ranks, in phases that none leaves before all have come to its end.

    Attributes:
        rank: index of this process.

    Args:
        process: who this process is.
        topic: what the operation is; all ranks give the same one. Operations of one topic follow each other.
        asked: first part of the errors, such as "Cannot save the checkpoint step-100."
        deadline: seconds to wait for the others at each phase.
        error: class of the errors that this raises by itself.
        remedy: last part of the errors for a failure of another rank.
    """

    def __init__(
        self,
        process: Process,
        topic: str,
        asked: str,
        deadline: float = 600.0,
        error: type[AccelError] = CollectiveError,
        remedy: str = "See the error of that process.",
    ) -> None:
        self.rank, self._world_size = process.rank, process.world_size
        self._topic, self._asked, self._deadline = topic, asked, deadline
        self._error, self._remedy = error, remedy
        self._later = min(_LATER, deadline / 2)
        self._process = process
        self._connection = _connection_of(process)
        self._number: int | None = None
        self._posts: list[str] = []
        self._results: list[str] = []
        self._over = False

    def wait(
        self, phase: str, value: str = "", combine: Callable[[Sequence[str]], str] = first, *, last: bool = False
    ) -> str:
        """Return what `combine` makes of the values of all ranks, once every rank has called this.

        Args:
            phase: name of the phase; each is waited for once.
            value: what this rank contributes.
            combine: called on rank 0 with the values in the order of the ranks.
            last: the operation ends with this phase.

        Raises:
            AccelError: a rank failed (`error`, or the class that was raised there if it is one of
                `accel_state.errors`), or did not come before the deadline (`error`).
        """
        if self._connection is None:
            return combine([value] * self._world_size)
        try:
            with self._store_named():
                return self._wait(self._connection.control, phase, value, combine, last)
        except BaseException as error:
            # What `combine` raised, or an interrupt; a failure that all know of is not reported again.
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Let every other rank raise this error at its next or present `wait` of this operation; never raises itself.

        Returns when the other ranks have heard it, after ten seconds at the latest.
        """
        if self._connection is None or self._over:
            return
        try:
            self._end(self._connection.control, {**_failure(error), "rank": self.rank})
        except AccelError:
            # The store went with the process that hosts it; the others learn that by themselves.
            self._over = True

    def leave(self) -> None:
        """End the operation, all phases of which went well; called on every rank, or as `last=True` of `wait`.

        The process that hosts the store stays until the others have heard the last result; rank 0 removes the keys.
        """
        if self._connection is not None and not self._over:
            self._over = True
            self._leave(self._connection.control)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report to the other ranks whatever the block raises."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def check(self) -> None:
        """Raise the failure that another rank has reported in this operation, if any; does not wait for one.

        Raises:
            AccelError: one has.
        """
        if self._connection is None or self._over:
            return
        control = self._connection.control
        try:
            failure = self._begin(control)
        except StoreUnreachable:
            return
        if failure is not None:
            self._raise(control, failure)

    # ------------------------------------------------------------------ one phase

    def _wait(
        self, control: ControlStore, phase: str, value: str, combine: Callable[[Sequence[str]], str], last: bool
    ) -> str:
        began = time.monotonic()
        failure = self._begin(control)
        if failure is not None:
            self._raise(control, failure)
        key = self._key(phase)
        posts = [f"{key}/{rank}" for rank in range(self._world_size)]
        control.set(posts[self.rank], value.encode(), _ANSWER)
        self._posts.append(posts[self.rank])
        self._results.append(key)
        if self.rank == 0:
            told = self._until(control, posts, began + self._deadline, phase)
            try:
                answer = combine([told[post].decode() for post in posts])
            except AccelError as error:
                self._end(control, {**_failure(error), "rank": None})
                raise
            control.set(key, answer.encode(), _ANSWER)
        else:
            answer = self._until(control, [key], began + self._deadline + self._later, phase, posts)[key].decode()
        if last:
            self.leave()
        return answer

    def _begin(self, control: ControlStore) -> Mapping[str, Any] | None:
        """Take the number of this operation; a failure that it has had already, if there is one."""
        assert self._connection is not None
        with self._connection.lock:
            if self._number is None:
                self._number = self._connection.operations[self._topic]
            failure = self._look_for_failure(control)
            while not self._posts and failure is not None and self.rank in failure.get("missing", ()):
                # The others have ended that operation without this rank.
                self._number += 1
                failure = self._look_for_failure(control)
            self._connection.operations[self._topic] = self._number + 1
        return failure

    def _until(
        self, control: ControlStore, keys: list[str], until: float, phase: str, posts: list[str] | None = None
    ) -> dict[str, bytes]:
        """What is under the keys, as soon as all are there; raises where a rank failed or time is up."""
        pause, breaks = _FIRST_PAUSE, 0
        # Rank 0 looks alone for the posts, all others for the result.
        longest = max(_LONGEST_PAUSE, self._world_size / _LOOKS_PER_SECOND if self.rank else 0.0)
        while True:
            left = until - time.monotonic()
            try:
                found = control.get_all(keys, min(max(left - self._later, 1.0), _ANSWER))
                if len(found) == len(keys):
                    return found
                failure = self._look_for_failure(control)
                if failure is not None:
                    self._raise(control, failure)
                if left <= 0:
                    self._raise_absence(control, posts or keys, phase)
                breaks = 0
            except StoreUnreachable as error:
                # A connection that broke is a host that is gone; one that is silent may come back.
                breaks += error.__cause__ is not None
                # Nobody else can tell this rank of a failure, so it does not outwait rank 0.
                if left <= (self._later if self.rank else 0.0) or breaks == _MOST_BREAKS:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _look_for_failure(self, control: ControlStore) -> Mapping[str, Any] | None:
        text = control.get_many([self._failed], _ANSWER).get(self._failed)
        return None if text is None else json.loads(text)

    def _key(self, phase: str) -> str:
        return f"accel/agreement/{self._topic}/{self._number}/{phase}"

    @property
    def _failed(self) -> str:
        return self._key("failed")

    # ------------------------------------------------------------------ ending

    def _raise_absence(self, control: ControlStore, posts: list[str], phase: str) -> NoReturn:
        missing = _absent(control, posts)
        if not missing and self.rank == 0:
            # Something is there under their keys that they did not sign.
            authentic = control.get_many(posts, _ANSWER)
            missing = [rank for rank, post in enumerate(posts) if post not in authentic][:_MOST_NAMED]
        told = self._look_for_failure(control)
        if told is not None:
            # A rank that has told the others of a failure takes its post away afterwards.
            self._raise(control, told)
        # Where all others have posted, rank 0 has stopped, or came later than this one.
        missing = missing or [0]
        failure = {"missing": missing, "phase": phase, "seconds": self._deadline, "more": len(missing) == _MOST_NAMED}
        self._end(control, failure)
        raise self._described(failure)

    def _raise(self, control: ControlStore, failure: Mapping[str, Any]) -> NoReturn:
        self._over = True
        self._leave(control, failure)
        raise self._described(failure)

    def _end(self, control: ControlStore, failure: Mapping[str, Any]) -> None:
        """Tell the others of a failure."""
        if self._number is None:
            self._begin(control)
        self._over = True
        control.set(self._failed, json.dumps(failure).encode(), _ANSWER)
        self._leave(control, failure)

    def _leave(self, control: ControlStore, failure: Mapping[str, Any] | None = None) -> None:
        """Say that this rank has heard the end of the operation; rank 0 waits for the others and cleans up."""
        assert self._connection is not None
        gone = set(failure.get("missing", ())) if failure else set()
        heard = {rank: f"{self._key('heard')}/{rank}" for rank in range(self._world_size) if rank not in gone}
        failed = self._connection.failed[self._topic]
        try:
            if self.rank != 0:
                if self.rank in heard:
                    control.set(heard[self.rank], b"", _ANSWER)
                control.delete(self._posts, _ANSWER)
                return
            others = [key for rank, key in heard.items() if rank != 0]
            came = control.wait(others, _FAREWELL)
            obsolete = [*came, *self._posts]
            if failure is not None:
                # Stays for those who come late, until the next operation is done.
                failed.append(self._failed)
            elif len(came) == len(others):
                obsolete += [*self._results, *failed]
                failed.clear()
            control.delete(obsolete, _FAREWELL)
        except StoreUnreachable:
            # What was agreed stands; somebody is gone already.
            return

    def _described(self, failure: Mapping[str, Any]) -> AccelError:
        if "missing" in failure:
            ranks = ", ".join(map(str, failure["missing"])) + (" and others" if failure.get("more") else "")
            return self._error(
                f"{self._asked} ({failure['phase']})",
                f"Process {ranks} did not come within {failure['seconds']:g} s. {self._everyone()}",
                "Look at what it does; call this on every process, or give a longer deadline.",
            )
        # Rank 0 compared the values of all; the result is not a failure of rank 0.
        who = "" if failure["rank"] is None else f"Process {failure['rank']} failed: "
        kind = getattr(errors, failure["type"], None)
        if failure["parts"] is not None and isinstance(kind, type) and issubclass(kind, AccelError):
            asked, obstacle, remedy = failure["parts"]
            return kind(asked, f"{who}{obstacle}", remedy)
        return self._error(self._asked, f"{who}{failure['type']}: {failure['text']}", self._remedy)

    def _everyone(self) -> str:
        """Where every process was."""
        return everyone(exchange_of(self._process.transport).watch, self.rank, self._world_size)

    @contextmanager
    def _store_named(self) -> Iterator[None]:
        """Raise what the store does not answer as an error of this operation."""
        try:
            yield
        except StoreUnreachable as error:
            self._over = True
            raise self._error(
                self._asked,
                f"The store of the run does not answer, so the process that hosts it may be gone: {error.obstacle} "
                f"{self._everyone()}",
                "Look at the output of the other processes, and start the run again.",
            ) from error


def raise_on_any_rank(
    process: Process,
    topic: str,
    work: Callable[[], T],
    asked: str,
    deadline: float = 600.0,
    error: type[AccelError] = CollectiveError,
) -> T:
    """Run `work` on every rank; what it raises on one is raised on all.

    Args:
        process: who this process is.
        topic: what the work is; all ranks give the same one.
        work: what each rank does; its own exception is raised where it has one.
        asked: first part of the error for a rank that failed or did not come.
        deadline: seconds to wait for the others.
        error: class of that error.

    Returns:
        What `work` returned on this rank.

    Raises:
        AccelError: it failed elsewhere, or a rank did not come before the deadline.

    Example:
        >>> from accel_state import current
        >>> raise_on_any_rank(current.process_or_start(), "check", lambda: 3, "Cannot check the files.")
        3
    """
    barrier = StoreBarrier(process, topic, asked, deadline, error)
    with barrier.reporting():
        result = work()
    barrier.wait("done", last=True)
    return result


def _failure(error: BaseException) -> dict[str, Any]:
    """An error in the form in which the other ranks receive it."""
    parts = [error.asked, error.obstacle, error.remedy] if isinstance(error, AccelError) else None
    return {"type": type(error).__name__, "text": str(error), "parts": parts}


def _absent(control: ControlStore, posts: Sequence[str]) -> list[int]:
    """Ranks without a post, the first few: halves that are complete are not looked at further."""
    absent: list[int] = []
    spans = [(0, len(posts))]
    while spans and len(absent) < _MOST_NAMED:
        low, high = spans.pop()
        if control.check(posts[low:high], _ANSWER):
            continue
        if high - low == 1:
            absent.append(low)
            continue
        middle = (low + high) // 2
        spans += [(middle, high), (low, middle)]
    return absent
