"""Collectives that start now and complete later, after the checked header of all collectives.

    pending = async_all_gather_bytes(data, "DataLoader.__next__")     # starts
    ...                                                             # compute meanwhile
    everyones = pending.wait()                                      # the bytes of all processes, by rank

A message stream from one process to the others uses such a collective for each step; on one machine it needs none.

If a process calls another collective meanwhile, all processes get the same error. These functions require a run of
several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch

from accel_ops.shared_memory import Handshake
from accel_state import current
from accel_state.errors import AccelError, CollectiveError
from accel_state.protocol.call import HeaderCall, PendingCall, start_all_gather_bytes
from accel_state.transport.base import Transport, Work

__all__ = ("PendingCall", "ScatterStream", "async_all_gather_bytes", "open_scatter_stream")


def async_all_gather_bytes(data: bytes, operation: str) -> PendingCall:
    """Start to gather a few bytes of every process; `wait` on the result returns the bytes of all, by rank.

    Args:
        data: at most as many bytes as fit into a header, about 1 KiB; lengths may differ.
        operation: name of the function that the user called, for error messages.
    """
    return start_all_gather_bytes(current.process_or_start().transport, operation, data)


class ScatterStream(Protocol):
    """A message stream from one process to the others; each step sends one message to each of them.

    The source calls `buffers`, `send`, `wait`; the others call `expect`, `wait`, `release`. All of them complete the
    same number of steps, and know the length of a message before they receive it. A message may be sent before the
    previous step is complete.
    """

    def buffers(self, nbytes: int) -> Sequence[Any]:
        """The buffers for the source's next messages: one for each of the others, of at least `nbytes` bytes."""

    def send(self) -> None:
        """Start to send the written messages."""

    def expect(self, nbytes: int) -> None:
        """Start to receive the next message, of `nbytes` bytes."""

    def wait(self) -> Any:
        """Complete a step and return the message; afterwards the source may send another one.

        Raises:
            ShapeMismatch: on every process, when one of them called another collective.
            CollectiveError: a process ended or did not call this in time.
        """

    def release(self) -> None:
        """Let the source overwrite the message that `wait` returned."""

    def close(self) -> None:
        """Leave the stream, at its end or before it."""


_broken: WeakSet[Transport] = WeakSet()
"""Transports on which a scatter failed, so that a message may still arrive."""


def open_scatter_stream(
    data: bytes, operation: str, step: str, wrap: Callable[[torch.Tensor], Any], src: int = 0
) -> tuple[bytes, ScatterStream]:
    """Open a message stream from one process to all others: through shared memory on one machine, else by scatters.

    Args:
        data: the first message of the source.
        operation: name of the function that the user called, for error messages.
        step: name of the function that the user calls at each step.
        wrap: converts a tensor, uint8 of shape (nbytes,), to the object that `buffers` and `wait` of the stream return.
            It is called once for each piece of memory, which is reused.
        src: rank of the sending process.

    Returns:
        The first message of the source, and the stream.

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
                    "Some processes left an earlier one before its end, and its messages could be taken for new ones.",
                    "Restart the run, and make all processes leave loaders at the same step.",
                )
            if transport.rank == src:
                handshake.listen()
            everyones = call.all_gather_bytes(bytes([len(handshake.address)]) + handshake.address + data, more=True)
            length = 1 + everyones[src][0]
            address, said = everyones[src][1:length], everyones[src][length:]
            if address and all(call.all_gather_bytes(b"1" if handshake.connect(address) else b"")):
                return said, handshake.stream(step, wrap)
    finally:
        handshake.end()
    return said, _ScatteredStream(transport, step, wrap, src)


class _ScatteredStream:
    """A stream in which each step is a scatter, after the checked header of all collectives."""

    def __init__(self, transport: Transport, step: str, wrap: Callable[[torch.Tensor], Any], src: int) -> None:
        self._transport = transport
        self._step = step
        self._wrap = wrap
        self._src = src
        # Two sets are used in turn, because one may still be in use. The source's message to itself is empty and is not
        # sent, but all messages must have the same length.
        self._sets: list[list[torch.Tensor]] = [[], []]
        self._wrapped: list[list[Any]] = [[], []]
        self._pending: tuple[PendingCall, Work] | None = None

    def buffers(self, nbytes: int) -> Sequence[Any]:
        """Host tensors for the next messages, one for each of the other processes."""
        self._turn(nbytes, torch.device("cpu"), self._transport.world_size)
        return self._wrapped[0][1:]

    def send(self) -> None:
        """Start to scatter the written messages, and the header that shows who takes part."""
        own, *messages = (message.to(self._transport.device) for message in self._sets[0])
        messages.insert(self._src, own)
        self._start(own, messages)

    def expect(self, nbytes: int) -> None:
        """Start to receive a message into a tensor on the device of the transport."""
        self._turn(nbytes, self._transport.device, 1)
        self._start(self._sets[0][0], None)

    def wait(self) -> Any:
        """Complete the scatter and return the received message; after a failure the transport opens no other stream."""
        assert self._pending is not None
        (header, work), self._pending = self._pending, None
        try:
            header.wait((work,))
        except AccelError:
            _broken.add(self._transport)
            raise
        return self._wrapped[0][0]

    def release(self) -> None:
        """Does nothing: the source has its own buffers."""

    def close(self) -> None:
        """Wait for the scatters that were started; the others have started them too."""
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
