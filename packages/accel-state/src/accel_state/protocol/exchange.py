"""The exchange of headers: each process sends one, receives those of all, and raises when they differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import CodeType
from typing import Any, Final, TypeGuard

import torch

from accel_state.errors import AccelError, CollectiveError, ShapeMismatch
from accel_state.protocol.description import CallDescription, fingerprint_of, hash_of, mismatch_error
from accel_state.protocol.header import HeaderFields
from accel_state.protocol.state import protocol_state
from accel_state.protocol.turn import is_raised_by_handler
from accel_state.transport.base import Transport, Work
from accel_state.watch.calls import Location, call_text

__all__ = ("NO_FINGERPRINT", "REFUSES", "HeaderExchange", "is_common")

_WAIT_SLICE: Final = timedelta(seconds=1)
"""How long a wait blocks before Python regains control and can handle a signal such as Ctrl-C."""

_EXTRA_TIMEOUT_S: Final = 1.0
"""Seconds beyond the timeout in which the backend may fail by itself."""

NO_FINGERPRINT: Final = 0
"""The fingerprint of a process that has none, or one that is ignored."""

REFUSES: Final = 1
"""Flag of a header: its process refuses to take part."""

_DESCRIBES: Final = 2
"""Flag of a header: its process sends its description."""

_MAX_CACHED_DESCRIPTIONS: Final = 1024


def is_common(error: BaseException) -> TypeGuard[ShapeMismatch | CollectiveError]:
    """Whether all processes raise an error of an exchange, or this one cannot reach the others any more."""
    return isinstance(error, (ShapeMismatch, CollectiveError)) and not is_raised_by_handler(error)


class HeaderExchange:
    """The exchanges of one call, and the errors of calls that differ or that nobody answers.

    Args:
        transport: the transport between at least two processes.
        operation: name of the function that the user called.
        arguments: values that must be equal on all processes, by name.
    """

    __slots__ = (
        "_arguments",
        "_exchanges",
        "_more",
        "_move",
        "_moves",
        "_operation",
        "_owes",
        "_site",
        "_state",
        "_thread",
        "_transport",
        "_under_way",
    )

    def __init__(self, transport: Transport, operation: str, **arguments: Any) -> None:
        self._transport = transport
        self._operation = operation
        self._arguments = {name: str(value) for name, value in arguments.items()}
        self._state = protocol_state(transport)
        # How many headers the other processes wait for that this process has not sent.
        self._owes = 1
        # Whether an exchange of headers has begun and not ended; a failure in it needs no refusal.
        self._exchanges = False
        # The exchange of headers that is under way, and whether the processes move data after it.
        self._under_way: Work | None = None
        self._moves = False
        # Moves that data, given the lengths in the headers; None if only the caller can.
        self._move: Callable[[Sequence[int]], object] | None = None
        # Whether the call exchanges other headers afterwards.
        self._more = False
        self._thread: str | None = None
        self._site: tuple[CodeType, int] | None = None

    def _complete(self, lengths: Sequence[int]) -> bool:
        """Take part in what follows the headers of an interrupted call; false if this process cannot.

        Args:
            lengths: the lengths of the payloads in the headers.
        """
        if self._move is not None:
            # It may refer to this call.
            move, self._move = self._move, None
            move(lengths)
            return True
        return not self._moves and max(lengths) <= self._state.header.capacity

    def wait(self, works: Iterable[Work]) -> None:
        """Wait until data has arrived.

        Raises:
            CollectiveError: a process ended or does not answer.
        """
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            if is_raised_by_handler(error):
                raise
            raise self._failure(error) from error

    def _header_only(self) -> tuple[int, CallDescription]:
        """Fingerprint and description of a call without leaves: only operation and arguments must be equal."""
        cache, key = self._state.header_only, (self._operation, *self._arguments.items())
        described = cache.get(key)
        if described is None:
            if len(cache) >= _MAX_CACHED_DESCRIPTIONS:
                cache.clear()
            description = self._describe([])
            described = cache[key] = (fingerprint_of(description), description)
        return described

    def _describe(self, leaves: list[tuple[str, str, str]]) -> CallDescription:
        return CallDescription(self._operation, self._arguments, leaves)

    def _exchange_bytes(
        self, fingerprint: int, description: CallDescription, data: bytes, flags: int, more: bool
    ) -> list[bytes]:
        """Exchange headers with these bytes in them, or after them if one is too long; the bytes of all, by rank."""
        header = self._state.header
        if len(data) <= header.capacity:
            header.write(data)
        self._exchange(fingerprint, description, len(data), flags, more)
        lengths = header.lengths()
        longest = max(lengths)
        if longest <= header.capacity:
            return [header.payload_of(rank, length) for rank, length in enumerate(lengths)]
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        received = torch.empty(len(lengths), longest, dtype=torch.uint8)
        self._moves = True
        self.wait([self._transport.all_gather(received.view(-1), padded, header=True)])
        self._moves = False
        return [received[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths)]

    def _exchange(
        self, fingerprint: int, description: CallDescription, length: int, flags: int, more: bool = False
    ) -> None:
        """Send the header and receive all; raise on every process when fingerprints or flags differ.

        With `more`, the call exchanges other headers afterwards.
        """
        self._exchanges, self._more = True, more
        pending, log, header = self._state.pending, self._state.log, self._state.header
        while pending:
            oldest = pending[0]
            try:
                oldest.complete()
            finally:
                # If it differs, all processes raise its error here, and do not wait for the header of this call.
                self._owes -= oldest.differs
        log.fingerprint = fingerprint
        fields = HeaderFields(self._marked(fingerprint), flags, length, log.number)
        self._under_way = header.all_gather(self._transport, fields)
        self._owes += more - 1
        self._wait_in_slices(self._under_way)
        are_equal = header.are_equal()
        # Descriptions follow instead of the rest of the call.
        self._owes += not are_equal and not more
        self._under_way = None
        if not are_equal:
            raise self._mismatch(description)
        self._exchanges = False

    def _marked(self, fingerprint: int) -> int:
        """A fingerprint that is equal only for calls of the same thread; most calls come from where the run began."""
        if not self._thread or fingerprint == NO_FINGERPRINT:
            return fingerprint
        # A thread that has the same name as another is that of no other process.
        mark = f"{self._transport.rank} {self._thread}" if self._is_of_overlapping_calls() else self._thread
        return fingerprint ^ hash_of(mark)

    def _is_of_overlapping_calls(self) -> bool:
        return self._thread in self._state.turn.overlapping

    def _mismatch(self, description: CallDescription) -> AccelError:
        """The error that shows how the calls differ; called only after all processes have seen that they do."""
        described = description._replace(
            location=str(self._location_of_call() or ""),
            group=self._transport.group,
            thread=self._thread or "",
            overlaps=self._is_of_overlapping_calls(),
        )
        rows = self._exchange_bytes(NO_FINGERPRINT, described, described.to_json(), _DESCRIBES, more=False)
        return mismatch_error([CallDescription.from_json(row) for row in rows], self._transport.ranks)

    def _text(self) -> str:
        return call_text(self._operation, self._transport.group, str(self._location_of_call() or ""))

    def _location_of_call(self) -> Location | None:
        """The line of the user's code that called this."""
        if self._site is None:
            return None
        call = self._state.log.last()
        return call.location if call else None

    def _wait_in_slices(self, work: Work) -> None:
        log, deadline = self._state.log, time.monotonic() + self._transport.timeout.total_seconds() + _EXTRA_TIMEOUT_S
        log.exchanges += 1
        for hook in self._state.exchange_hooks:
            hook(log.exchanges)
        completed = False
        while True:
            try:
                work.wait(_WAIT_SLICE)
            except RuntimeError as error:
                if is_raised_by_handler(error):
                    raise
                # Work may complete just after a wait for it timed out. Only a later wait raises the work's own error.
                if completed or time.monotonic() > deadline:
                    raise self._failure(error) from error
                completed = work.is_completed()
            else:
                return

    def _failure(self, error: BaseException) -> AccelError:
        from accel_state.watch.report import collective_error

        state, transport = self._state, self._transport
        state.header.renew()
        rank = transport.rank_in_run(transport.rank)
        return collective_error(error, state.log.last(), rank, state.world_size, state.monitor, transport.ranks)
