"""The slot: the one message of fixed size that every process sends in every call.

Backends do not check sizes: on a mismatch gloo aborts the process, waits for ever, or returns garbage. So the first
thing that moves in each call is of a size that depends on the number of processes alone. It holds a header that says
what the call is about, and as much of the data as fits. What follows has sizes that all have seen to be equal.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import torch

from accel_state.transport.base import Transport, Work

__all__ = ("ALIGNMENT", "HEADER", "Header", "Slot", "slot_size")

ALIGNMENT: Final = 16
"""Bytes; the size of complex128, so that every dtype can be read where a segment of a payload begins."""

_LAYOUT: Final = struct.Struct("<QQQQ")
HEADER: Final = _LAYOUT.size
"""Bytes of the header, a multiple of `ALIGNMENT`."""

_CHECKED: Final = 16
"""Bytes at the start of the header that must be equal on all processes: fingerprint and flags."""

_LARGEST: Final = 64 * 1024
_SMALLEST: Final = 1024
_RECEIVED: Final = 256 * 1024


def slot_size(world_size: int) -> int:
    """Bytes of a slot. It shrinks with the number of processes, because every process receives all slots."""
    fair = _RECEIVED // world_size // ALIGNMENT * ALIGNMENT
    return max(_SMALLEST, min(_LARGEST, fair))


class Header(NamedTuple):
    """What the call of one process is about.

    Args:
        fingerprint: hash of operation, arguments, structure, shapes and dtypes.
        flags: 0, or what else must be equal on all processes.
        length: bytes of payload.
        number: number of the call in the log of that process.
    """

    fingerprint: int
    flags: int
    length: int
    number: int


class Slot:
    """The buffers of one process for its slots.

    Args:
        world_size: number of processes.

    Attributes:
        capacity: bytes of payload that fit.
    """

    __slots__ = ("_flat", "_memory", "_received", "_sent", "_size", "_table", "_world_size", "capacity")

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._size = slot_size(world_size)
        self.capacity = self._size - HEADER
        self.renew()

    def renew(self) -> None:
        """Take new buffers; those of a collective that was given up may still be written to."""
        # Buffers made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._sent = torch.zeros(self._size, dtype=torch.uint8)
            self._received = torch.empty(self._world_size, self._size, dtype=torch.uint8)
            # Kept, because a view made for a call would be released by a thread of the backend, which takes the GIL.
            self._flat = self._received.view(-1)
        self._memory = memoryview(self._sent.numpy().data)
        self._table = self._received.numpy()

    def payload(self, length: int) -> torch.Tensor:
        """Where the payload of this process is written, uint8 of shape (length,)."""
        return self._sent[HEADER : HEADER + length]

    def write(self, data: bytes) -> None:
        """Put bytes into the payload of this process."""
        self._memory[HEADER : HEADER + len(data)] = data

    def start(self, transport: Transport, header: Header) -> Work:
        """Send this process's slot and receive all."""
        _LAYOUT.pack_into(self._memory, 0, header.fingerprint, header.flags, header.length, header.number)
        return transport.all_gather(self._flat, self._sent, header=True)

    def agreed(self) -> bool:
        """Whether fingerprint and flags that were received are equal on all processes."""
        return self._table[:, :_CHECKED].tobytes() == bytes(self._memory[:_CHECKED]) * self._world_size

    def headers(self) -> list[Header]:
        """The headers that were received, by rank."""
        return [Header(*_LAYOUT.unpack_from(row)) for row in self._table]

    def lengths(self) -> list[int]:
        """Bytes of payload that each process announced."""
        return [header.length for header in self.headers()]

    def rows(self, length: int) -> torch.Tensor:
        """The payloads that were received, uint8 of shape (world_size, length); overwritten by the next call."""
        return self._received[:, HEADER : HEADER + length]

    def row(self, rank: int, length: int) -> bytes:
        """A copy of the payload of one process."""
        return self._table[rank, HEADER : HEADER + length].tobytes()
