"""The protocol of a checked call between processes.

    with HeaderCall(transport, "gather_object") as call:    # logged; calls of other threads wait
        everyones = call.swap_bytes(data)                   # headers exchanged and compared, then the data

    posted = post(transport, "DataLoader.__next__", data)   # the same, under way while the caller does other things
    everyones = posted.wait()

Every process sends a header of one size first, whatever it calls. So processes that call different things see so, and
all of them raise the same error. A failure before that is sent to the others in place of the header, so that they
raise too instead of waiting.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Final

import torch

from accel_state.errors import AccelError, ShapeMismatch
from accel_state.hang_report.call_log import CallLog, Location, caller, locate
from accel_state.hang_report.failure import explain
from accel_state.hang_report.watch import Watch
from accel_state.protocol.descriptions import Description, fingerprint_of, mismatch
from accel_state.protocol.slot import Header, Slot
from accel_state.transport.base import Transport, Work

__all__ = ("Exchange", "HeaderCall", "Posted", "exchange_of", "meet", "post", "share_exchange")

_SLICE: Final = timedelta(seconds=1)
"""How long a wait lasts before Python looks up, so that a signal such as Ctrl-C is acted on."""

_GRACE: Final = 1.0
"""Seconds that the backend is given beyond the timeout to fail by itself."""

_DIFFERENT: Final = 0
"""The fingerprint of a process that has none, or none that counts."""

_REFUSED: Final = 1
_DESCRIBED: Final = 2
_KEPT: Final = 1024


class Exchange:
    """What is kept for the calls on one transport: slot, call log, what was posted, and the watch.

    Args:
        transport: how the slots travel; not kept.
        like: the exchange of another transport between the same processes, to go on with its log.

    Attributes:
        plans: what upper layers keep for a call of the same form.
        posted: calls that were posted and not waited for, in their order.
    """

    __slots__ = ("__weakref__", "bare", "lock", "log", "plans", "posted", "slot", "watch")

    def __init__(self, transport: Transport, like: Exchange | None = None) -> None:
        self.slot = Slot(transport.world_size)
        self.plans: dict[Hashable, Any] = {}
        self.bare: dict[Hashable, tuple[int, Description]] = {}
        self.lock: threading.RLock = like.lock if like else threading.RLock()
        self.log: CallLog = like.log if like else CallLog()
        self.posted: deque[Posted] = like.posted if like else deque()
        self.watch: Watch = like.watch if like else self._begin_watch(transport)

    def _begin_watch(self, transport: Transport) -> Watch:
        watch = Watch(self.log, transport.control(), transport.rank, transport.world_size)
        weakref.finalize(self, watch.stop)
        return watch


_exchanges: weakref.WeakKeyDictionary[Transport, Exchange] = weakref.WeakKeyDictionary()


def exchange_of(transport: Transport) -> Exchange:
    """What is kept for a transport; made at the first call."""
    exchange = _exchanges.get(transport)
    if exchange is None:
        exchange = _exchanges[transport] = Exchange(transport)
    return exchange


def share_exchange(transport: Transport, original: Transport) -> None:
    """Let a transport that passes its calls on to `original` go on with the log of that one."""
    _exchanges[transport] = Exchange(transport, like=exchange_of(original))


def meet(transport: Transport, operation: str) -> None:
    """Return when every process has called this with the same operation.

    Args:
        transport: between the processes.
        operation: name of the function that the user called.

    Raises:
        ShapeMismatch: on every process, when one of them called something else.
        CollectiveError: a process is gone or did not come in time.
    """
    if transport.world_size > 1:
        with HeaderCall(transport, operation) as call:
            call.meet()


def post(transport: Transport, operation: str, data: bytes) -> Posted:
    """Start to bring bytes of every process to all, and return at once.

    Calls that begin afterwards complete it first, so that calls are compared in the order in which they were made.

    Args:
        transport: between the processes.
        operation: name of the function that the user called.
        data: as many bytes as fit into a slot.
    """
    return Posted(transport, operation, data)


class HeaderCall:
    """One checked call; a context manager.

    Args:
        transport: between more than one process.
        operation: name of the function that the user called.
        arguments: what must be equal on all processes, by name.
    """

    __slots__ = ("_arguments", "_exchange", "_met", "_no_grad", "_operation", "_transport")

    def __init__(self, transport: Transport, operation: str, **arguments: Any) -> None:
        self._transport = transport
        self._operation = operation
        self._arguments = {name: str(value) for name, value in arguments.items()}
        self._exchange = exchange_of(transport)
        self._met = False
        self._no_grad = torch.no_grad()

    def __enter__(self) -> Any:
        self._exchange.lock.acquire()
        self._exchange.log.enter(self._operation)
        self._no_grad.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) and not self._met:
                self._refuse(error)
        finally:
            self._no_grad.__exit__(kind, error, trace)
            self._exchange.log.leave()
            self._exchange.lock.release()

    def meet(self) -> None:
        """Return when every process is in this call.

        Raises:
            ShapeMismatch: on every process, when they call different things.
            CollectiveError: a process did not come.
        """
        self._meet(*self._bare(), 0)

    def swap_bytes(self, data: bytes) -> list[bytes]:
        """The bytes of all processes, which may differ in length, by rank."""
        return self._swap(*self._bare(), data)

    def wait(self, works: Iterable[Work]) -> None:
        """Wait until data has arrived.

        Raises:
            CollectiveError: a process is gone or does not answer.
        """
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._failure(error) from error

    def _bare(self) -> tuple[int, Description]:
        """Fingerprint and description of a call in which operation and arguments alone must be equal."""
        bare, key = self._exchange.bare, (self._operation, *self._arguments.items())
        found = bare.get(key)
        if found is None:
            if len(bare) >= _KEPT:
                bare.clear()
            description = self._describe([])
            found = bare[key] = (fingerprint_of(description), description)
        return found

    def _describe(self, leaves: list[tuple[str, str, str]]) -> Description:
        return Description(self._operation, self._arguments, leaves)

    def _swap(self, fingerprint: int, description: Description, data: bytes, flags: int = 0) -> list[bytes]:
        slot = self._exchange.slot
        if len(data) <= slot.capacity:
            slot.write(data)
        self._meet(fingerprint, description, len(data), flags)
        lengths = slot.lengths()
        longest = max(lengths)
        if longest <= slot.capacity:
            return [slot.row(rank, length) for rank, length in enumerate(lengths)]
        given = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        received = torch.empty(len(lengths), longest, dtype=torch.uint8)
        self.wait([self._transport.all_gather(received.view(-1), given, header=True)])
        return [received[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]

    def _meet(self, fingerprint: int, description: Description, length: int, flags: int = 0) -> None:
        """Exchange slots, and raise on every process when fingerprints or flags differ."""
        self._met = True
        posted, log = self._exchange.posted, self._exchange.log
        while posted:
            posted[0].complete()
        log.fingerprint = fingerprint
        slot = self._exchange.slot
        self._wait_in_slices(slot.start(self._transport, Header(fingerprint, flags, length, log.number)))
        if not slot.agreed():
            raise self._difference(description)

    def _difference(self, description: Description) -> AccelError:
        """What the calls of the processes differ in; asked only after all have seen that they differ."""
        described = replace(description, location=str(self._where() or ""))
        rows = self._swap(_DIFFERENT, described, described.to_json(), _DESCRIBED)
        return mismatch([Description.from_json(row) for row in rows])

    def _where(self) -> Location | None:
        """The line of the user's code that called this."""
        call = self._exchange.log.last()
        return call.location if call else None

    def _refuse(self, error: Exception) -> None:
        """Tell the others that this process cannot take part, so that they raise as well."""
        if isinstance(error, AccelError):
            reason = (error.asked, error.obstacle, error.remedy)
        else:
            reason = (f"{type(error).__name__}: {error}", "", "See the traceback of that process.")
        try:
            self._meet(_DIFFERENT, replace(self._describe([]), refusal=reason), 0, _REFUSED)
        except ShapeMismatch:
            return

    def _wait_in_slices(self, work: Work) -> None:
        deadline = time.monotonic() + self._transport.timeout.total_seconds() + _GRACE
        completed = False
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError as error:
                # Work may complete just after a wait for it timed out: only the error of a later wait is its own.
                if completed or time.monotonic() > deadline:
                    raise self._failure(error) from error
                completed = work.is_completed()
            else:
                return

    def _failure(self, error: BaseException) -> AccelError:
        exchange, transport = self._exchange, self._transport
        exchange.slot.renew()
        return explain(error, exchange.log.last(), transport.rank, transport.world_size, exchange.watch)


class Posted(HeaderCall):
    """A checked call that was started; see `post`.

    Args:
        transport: between the processes.
        operation: name of the function that the user called.
        data: as many bytes as fit into a slot.
    """

    __slots__ = ("_error", "_location", "_slot", "_work")

    def __init__(self, transport: Transport, operation: str, data: bytes) -> None:
        super().__init__(transport, operation)
        self._met = True
        self._error: AccelError | None = None
        exchange = self._exchange
        self._location = caller()
        # The slot of the exchange is used by calls that begin while this one is on its way.
        self._slot = Slot(transport.world_size)
        self._slot.write(data)
        with exchange.lock, torch.no_grad():
            header = Header(self._bare()[0], 0, len(data), exchange.log.number)
            self._work: Work | None = self._slot.start(transport, header)
            exchange.posted.append(self)

    def wait(self, works: Iterable[Work] = ()) -> list[bytes]:  # type: ignore[override]
        """The bytes of all processes, by rank, once data that follow them have arrived too.

        Raises:
            ShapeMismatch: on every process, when they call different things.
            CollectiveError: a process is gone or did not come in time.
        """
        with self:
            while self._work is not None:
                self._exchange.posted[0].complete()
            if self._error is not None:
                raise self._error
            super().wait(works)
        return [self._slot.row(rank, length) for rank, length in enumerate(self._slot.lengths())]

    def complete(self) -> None:
        """Wait for this call, the oldest one that was posted; what went wrong is raised by `wait` as well."""
        self._exchange.posted.popleft()
        work, self._work = self._work, None
        assert work is not None
        try:
            self._wait_in_slices(work)
            if not self._slot.agreed():
                raise self._difference(self._bare()[1])
        except AccelError as error:
            self._error = error
            raise

    def _where(self) -> Location | None:
        return locate(self._location[0].co_filename, self._location[1])
