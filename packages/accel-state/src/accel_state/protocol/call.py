"""A checked call between processes, and what becomes of a call that is interrupted.

    with HeaderCall(transport, "gather_object") as call:    # logged; calls of other threads wait
        rows = call.all_gather_bytes(data)                  # headers exchanged and compared, then the data

    pending = start_all_gather_bytes(transport, "DataLoader.__next__", data)    # the same, without waiting
    rows = pending.wait()

If the headers differ, all processes raise the same error. A process that fails before it sends its header sends a
refusal instead, so that the others raise too and do not wait. A process that leaves a call after that remembers it, and
refuses its next call: the others may have completed the interrupted one, and their results would be those of other
calls. If they wait for data of the interrupted call, its process sends and receives them first where it can, and else
closes its connections.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Final, NoReturn

import torch

from accel_state.errors import AccelError, CollectiveError, NotReady, ShapeMismatch
from accel_state.library import caller
from accel_state.protocol.description import CallDescription, mismatch_error
from accel_state.protocol.exchange import NO_FINGERPRINT, REFUSES, HeaderExchange, is_common
from accel_state.protocol.header import EagerHeader, HeaderFields
from accel_state.protocol.turn import InterruptedCall, InterruptedExchange
from accel_state.transport.base import Transport, Work
from accel_state.watch.calls import Location, locate

__all__ = ("HeaderCall", "PendingCall", "barrier", "start_all_gather_bytes")

_END_THE_RUN_REMEDY: Final = (
    "End the run after an interrupt of a collective. To react to a signal and go on, set a variable in its handler, "
    "and read it between two steps."
)


def barrier(transport: Transport, operation: str) -> None:
    """Return when every process has called this with the same operation.

    Args:
        transport: the transport between the processes.
        operation: name of the function that the user called.

    Raises:
        ShapeMismatch: on every process, when one of them called another collective.
        CollectiveError: a process ended or did not call this in time.
    """
    if transport.world_size > 1:
        with HeaderCall(transport, operation) as call:
            call.barrier()


def start_all_gather_bytes(transport: Transport, operation: str, data: bytes) -> PendingCall:
    """Start to gather bytes of every process on all processes, and return at once.

    Calls that begin afterwards complete it first, so that the processes compare calls in the order in which they made
    them.

    Args:
        transport: the transport between the processes.
        operation: name of the function that the user called.
        data: as many bytes as fit into an eager header.
    """
    return PendingCall(transport, operation, data)


class HeaderCall(HeaderExchange):
    """One checked call; a context manager.

    Args:
        transport: the transport between at least two processes.
        operation: name of the function that the user called.
        arguments: values that must be equal on all processes, by name.
    """

    __slots__ = ("_no_grad",)

    def __init__(self, transport: Transport, operation: str, **arguments: Any) -> None:
        super().__init__(transport, operation, **arguments)
        self._no_grad = torch.no_grad()

    def __enter__(self) -> Any:
        turn = self._state.turn
        self._check_not_inside_a_call()
        try:
            turn.begin(self)
            # A pending call has the thread that started it.
            self._thread = turn.thread_name() if self._thread is None else self._thread
            self._site = self._state.log.enter(self._operation)
            self._no_grad.__enter__()
        except BaseException as error:
            # The other processes may wait for this call.
            self._interrupt(type(error).__name__)
            if self._site is not None:
                self._state.log.leave()
            turn.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            try:
                if error is not None:
                    self._end_early(error)
            finally:
                self._no_grad.__exit__(kind, error, trace)
                self._state.log.leave()
        finally:
            self._state.turn.end()

    def _check_not_inside_a_call(self) -> None:
        """Raise in a signal handler (or in a finalizer) that was called inside a call of the same thread.

        Raises:
            NotReady: the headers of both calls would be mixed.
        """
        state = self._state
        if state.turn.thread != threading.get_ident():
            return
        if state.turn.is_left():
            state.turn.call._interrupt("a signal")
            state.turn.end()
            return
        outer = state.log.active()
        raise NotReady(
            f"Cannot call {self._operation}() inside {f'{outer}' if outer else 'another collective'}.",
            "A signal handler or a finalizer interrupted that call, and the processes would mix the data of both.",
            "Set a variable in the handler, and call the collective after the other one has returned.",
        )

    def _end_early(self, error: BaseException) -> None:
        """Send a refusal, so that the other processes raise as well; or remember an interrupt of this call."""
        if self._owes and not self._exchanges and isinstance(error, Exception):
            try:
                self._refuse(error)
            except BaseException as interruption:
                self._end_early(interruption)
                raise
        elif is_common(error):
            self._move = None
        else:
            self._interrupt(type(error).__name__)

    def _interrupt(self, cause: str) -> None:
        """Remember that this call was interrupted, so that the next one is refused on all processes."""
        state = self._state
        # The first one, if this call would have been refused because of it.
        interrupted = state.turn.interrupted or InterruptedCall(self._text(), cause)
        state.monitor.interruption = f"{interrupted.text} was interrupted by {interrupted.cause}"
        has_sent_header = not self._owes
        if self._moves and has_sent_header and (self._move is None or self._under_way is None):
            # The other processes wait for the data of this one, and must not wait until their timeout.
            self._transport.abort()
            interrupted = interrupted._replace(broken=True)
        if self._under_way is not None:
            # The next call must not overwrite the buffers.
            exchange = InterruptedExchange(copy.copy(state.header), self._under_way, self._complete, self._more)
            interrupted = interrupted._replace(exchange=exchange)
            state.header.renew()
        state.turn.interrupted = interrupted._replace(owes=interrupted.owes + self._owes)
        self._owes, self._under_way = 0, None

    def _refuse_after(self, interrupted: InterruptedCall) -> NoReturn:
        """Refuse this call on all processes, because an earlier one was interrupted on this one.

        The others may still be in the interrupted call; they complete it, or get an error there.
        """
        # From here on, an exception interrupts this call too.
        self._exchanges, self._moves = True, False
        turn = self._state.turn
        failure = f"{interrupted.text} was interrupted by {interrupted.cause}."
        reason = (
            failure,
            "Its result is missing here, so that later calls could get results of others.",
            _END_THE_RUN_REMEDY,
        )
        description = self._describe([])._replace(refusal=reason)
        exchange, are_equal = interrupted.exchange, True
        if exchange is not None and not interrupted.broken:
            self._wait_in_slices(exchange.work)
            are_equal = exchange.header.are_equal()
            # An error leaves a part of the data behind.
            is_broken = True
            try:
                is_broken = are_equal and not exchange.complete(exchange.header.lengths())
            finally:
                if is_broken:
                    self._transport.abort()
                    turn.interrupted = interrupted = interrupted._replace(broken=True)
        if interrupted.broken:
            turn.interrupted = interrupted._replace(exchange=None)
            raise CollectiveError(
                f"Cannot run {self._text()}: this process has closed its connections.",
                f"{failure} The other processes waited for its data.",
                "Restart the run.",
            )
        # Descriptions follow where headers differ, instead of the rest of the call.
        self._owes += interrupted.owes + (exchange is not None and not are_equal and not exchange.more)
        turn.interrupted = interrupted._replace(exchange=None, owes=0)
        if not are_equal:
            self._despite_mismatch(self._mismatch, description)
        while self._owes > 1:
            self._despite_mismatch(self._exchange, NO_FINGERPRINT, description, 0, REFUSES)
        turn.interrupted, self._state.monitor.interruption = None, ""
        self._exchange(NO_FINGERPRINT, description, 0, REFUSES)
        # All processes have refused the call.
        raise mismatch_error([description], [self._transport.rank_in_run(self._transport.rank)])

    @staticmethod
    def _despite_mismatch(exchange: Callable[..., object], *arguments: Any) -> None:
        """Exchange headers although others are known to differ."""
        try:
            exchange(*arguments)
        except ShapeMismatch as error:
            if not is_common(error):
                raise

    def barrier(self) -> None:
        """Return when every process is in this call.

        Raises:
            ShapeMismatch: on every process, when their calls differ.
            CollectiveError: a process did not call this in time.
        """
        self._exchange_headers(*self._header_only(), 0)

    def all_gather_bytes(self, data: bytes, more: bool = False) -> list[bytes]:
        """The bytes of all processes, by rank; their lengths may differ. With `more`, the call goes on afterwards."""
        return self._all_gather_bytes(*self._header_only(), data, more=more)

    def _all_gather_bytes(
        self, fingerprint: int, description: CallDescription, data: bytes, flags: int = 0, more: bool = False
    ) -> list[bytes]:
        self._check_not_interrupted()
        return self._exchange_bytes(fingerprint, description, data, flags, more)

    def _exchange_headers(
        self, fingerprint: int, description: CallDescription, length: int, flags: int = 0, more: bool = False
    ) -> None:
        """Exchange headers as `_exchange` does, unless this process has left an earlier call."""
        self._check_not_interrupted()
        self._exchange(fingerprint, description, length, flags, more)

    def _check_not_interrupted(self) -> None:
        if self._state.turn.interrupted is not None:
            self._refuse_after(self._state.turn.interrupted)

    def _refuse(self, error: Exception) -> None:
        """Send a refusal, so that the other processes raise as well."""
        if isinstance(error, AccelError):
            reason = (error.failure, error.obstacle, error.remedy)
        else:
            reason = (f"{type(error).__name__}: {error}", "", "See the traceback of that process.")
        description = self._describe([])._replace(refusal=reason)
        self._despite_mismatch(self._exchange_headers, NO_FINGERPRINT, description, 0, REFUSES)


class PendingCall(HeaderCall):
    """A checked call that was started; see `start_all_gather_bytes`.

    Args:
        transport: the transport between the processes.
        operation: name of the function that the user called.
        data: as many bytes as fit into an eager header.

    Attributes:
        differs: whether it has ended because the calls of the processes differ.
    """

    __slots__ = ("_error", "_header", "_location", "_received", "_work", "differs")

    def __init__(self, transport: Transport, operation: str, data: bytes) -> None:
        super().__init__(transport, operation)
        self._error: AccelError | None = None
        self._received: list[bytes] | None = None
        self._work: Work | None = None
        self.differs = False
        self._location = caller()
        state = self._state
        self._check_not_inside_a_call()
        if state.turn.interrupted is not None:
            with self:
                self._refuse_after(state.turn.interrupted)
        try:
            state.turn.begin(self)
            self._start(data)
        except BaseException as error:
            self._interrupt(type(error).__name__)
            raise
        finally:
            state.turn.end()

    def _start(self, data: bytes) -> None:
        state, transport = self._state, self._transport
        self._thread = state.turn.thread_name()
        with torch.no_grad():
            # Calls that begin while this one is pending use the header of the state.
            self._header = state.spare_headers.pop() if state.spare_headers else EagerHeader(transport.world_size)
            self._header.write(data)
            fields = HeaderFields(self._marked(self._header_only()[0]), 0, len(data), state.log.number)
            self._work = self._header.all_gather(transport, fields)
            self._owes = 0
            state.pending.append(self)

    def wait(self, works: Iterable[Work] = ()) -> list[bytes]:  # type: ignore[override]
        """Wait for this call and for further works of it; return the bytes of all processes, by rank.

        Raises:
            ShapeMismatch: on every process, when their calls differ.
            CollectiveError: a process ended or did not call this in time.
        """
        if self._state.turn.thread == threading.get_ident():
            # Inside another call, such as in the finalizer of a loader. The header was sent before that call.
            return self._receive(works)
        with self:
            return self._receive(works)

    def _receive(self, works: Iterable[Work]) -> list[bytes]:
        while self._work is not None:
            self._state.pending[0].complete()
        if self._error is not None:
            raise self._error
        super().wait(works)
        if self._received is None:
            header = self._header
            self._received = [header.payload_of(rank, length) for rank, length in enumerate(header.lengths())]
            self._state.spare_headers.append(header)
        return self._received

    def complete(self) -> None:
        """Wait for this call, the oldest pending one; `wait` raises its error as well.

        It remains pending if the wait is interrupted.
        """
        work = self._work
        assert work is not None
        try:
            self._wait_in_slices(work)
            # Descriptions follow where headers differ.
            self.differs = not self._header.are_equal()
            self._owes = int(self.differs)
            self._leave_queue()
            if self.differs:
                raise self._mismatch(self._header_only()[1])
        except BaseException as error:
            if is_common(error):
                self._leave_queue()
                self._error = error
            elif self._work is not None:
                self._owes, self.differs = 0, False
            elif self._owes or self._under_way is not None:
                # The call that completes this one does not know that it differs.
                cause = type(error).__name__
                self._interrupt(cause)
                self._error = CollectiveError(
                    f"Cannot complete {self._text()}.", f"It was interrupted by {cause}.", _END_THE_RUN_REMEDY
                )
            raise

    def _leave_queue(self) -> None:
        self._work = None
        if self in self._state.pending:
            self._state.pending.remove(self)

    def _location_of_call(self) -> Location | None:
        return locate(self._location[0].co_filename, self._location[1])
