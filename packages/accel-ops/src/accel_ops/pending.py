"""Collectives that start now and are waited for later, behind the checked header of all collectives.

    pending = async_all_gather_bytes(data, "DataLoader.__next__")     # starts
    ...                                                             # computes meanwhile
    everyones = pending.wait()                                      # the bytes of all processes, by rank

A stream of messages from one process to the others is such a collective in each step, or needs none on one machine.

A process that calls something else meanwhile gets the same error as all others. On one process nothing travels, so
these functions expect a run of several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch

from accel_ops.shared_memory import Handshake
from accel_state import current
from accel_state.errors import AccelError, CollectiveError
from accel_state.protocol import HeaderCall, PendingCall, start_all_gather_bytes
from accel_state.transport.base import Transport, Work

__all__ = ("PendingCall", "ScatterStream", "async_all_gather_bytes", "open_scatter_stream")


def async_all_gather_bytes(data: bytes, operation: str) -> PendingCall:
    """Start to gather a few bytes of every process; `wait` on the result returns those of all, by rank.

    Args:
        data: at most as many bytes as fit into a header, about 1 KiB; lengths may differ.
        operation: name of the function that the user called, for error messages.
    """
    return start_all_gather_bytes(current.process_or_start().transport, operation, data)


class ScatterStream(Protocol):
    """Messages from one process to each of the others, in steps of one message to each.

    The source: `buffers`, `send`, `wait`. The others: `expect`, `wait`, `release`. All of them complete as many steps,
    and know the length of a message before it comes. A message may be sent before the step before is complete.
    """

    def buffers(self, nbytes: int) -> Sequence[Any]:
        """Where the source writes the next messages: one for each of the others, of at least so many bytes."""

    def send(self) -> None:
        """Start to send what was written."""

    def expect(self, nbytes: int) -> None:
        """Start to receive the next message, of so many bytes."""

    def wait(self) -> Any:
        """Complete a step, and return the message; the source may send another one.

        Raises:
            ShapeMismatch: on every process, when one of them called another collective.
            CollectiveError: a process ended or did not call this in time.
        """

    def release(self) -> None:
        """Let the source overwrite the message that `wait` returned."""

    def close(self) -> None:
        """Take part no longer, at the end or before it."""


_broken: WeakSet[Transport] = WeakSet()
"""Transports on which a scatter failed, so that a message may still be under way."""


def open_scatter_stream(
    data: bytes, operation: str, step: str, wrap: Callable[[torch.Tensor], Any], src: int = 0
) -> tuple[bytes, ScatterStream]:
    """Begin to send messages from one process to all others: over shared memory on one machine, else by scatters.

    Args:
        data: what the source says first.
        operation: name of the function that the user called, for error messages.
        step: name of the one that the user calls at each step.
        wrap: makes of a tensor, uint8 of shape (nbytes,), what `buffers` and `wait` of the stream give out. It is
            called once for memory that is used again and again.
        src: the process that sends.

    Returns:
        What the source said, and the stream.

    Raises:
        ShapeMismatch: on every process, when one of them called another collective.
        CollectiveError: a process ended or did not call this in time; or a scatter of this run failed earlier, and its
            message could be taken for the next one.
    """
    transport = current.process_or_start().transport
    handshake = Handshake(transport, src)
    try:
        with HeaderCall(transport, operation) as call:
            if transport in _broken:
                raise CollectiveError(
                    f"Cannot begin {operation}.",
                    "Some processes left an earlier one before its end, and its messages could be mistaken for those "
                    "of this one.",
                    "Restart the run, and let all processes leave loaders at the same step.",
                )
            if transport.rank == src:
                handshake.listen()
            everyones = call.all_gather_bytes(bytes([len(handshake.address)]) + handshake.address + data)
            length = 1 + everyones[src][0]
            address, said = everyones[src][1:length], everyones[src][length:]
            if address and all(call.all_gather_bytes(b"1" if handshake.connect(address) else b"")):
                return said, handshake.stream(step, wrap)
    finally:
        handshake.end()
    return said, _ScatteredStream(transport, step, wrap, src)


class _ScatteredStream:
    """A stream in which each step is a scatter, behind the checked header of all collectives."""

    def __init__(self, transport: Transport, step: str, wrap: Callable[[torch.Tensor], Any], src: int) -> None:
        self._transport = transport
        self._step = step
        self._wrap = wrap
        self._src = src
        # Two sets in turn: one may still be under way. The source's own message carries nothing and does not travel,
        # but all messages must have one length.
        self._sets: list[list[torch.Tensor]] = [[], []]
        self._wrapped: list[list[Any]] = [[], []]
        self._pending: tuple[PendingCall, Work] | None = None

    def buffers(self, nbytes: int) -> Sequence[Any]:
        """See `ScatterStream`."""
        self._turn(nbytes, torch.device("cpu"), self._transport.world_size)
        return self._wrapped[0][1:]

    def send(self) -> None:
        """See `ScatterStream`."""
        own, *messages = (message.to(self._transport.device) for message in self._sets[0])
        messages.insert(self._src, own)
        self._start(own, messages)

    def expect(self, nbytes: int) -> None:
        """See `ScatterStream`."""
        self._turn(nbytes, self._transport.device, 1)
        self._start(self._sets[0][0], None)

    def wait(self) -> Any:
        """See `ScatterStream`."""
        assert self._pending is not None
        (header, work), self._pending = self._pending, None
        try:
            header.wait((work,))
        except AccelError:
            _broken.add(self._transport)
            raise
        return self._wrapped[0][0]

    def release(self) -> None:
        """Nothing to do: the source has buffers of its own."""

    def close(self) -> None:
        """Wait for what was started; the others started it too."""
        if self._pending is not None:
            self.wait()

    def _turn(self, nbytes: int, device: torch.device, count: int) -> None:
        self._sets.reverse()
        self._wrapped.reverse()
        if not self._sets[0] or self._sets[0][0].numel() != nbytes:
            self._sets[0] = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(count)]
            self._wrapped[0] = [self._wrap(message) for message in self._sets[0]]

    def _start(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None) -> None:
        header = start_all_gather_bytes(self._transport, self._step, b"")
        self._pending = header, self._transport.scatter(output, inputs, self._src)
