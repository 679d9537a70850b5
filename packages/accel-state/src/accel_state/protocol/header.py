"""The eager header, which every process sends first in each call.

Backends do not check sizes: on a mismatch gloo aborts the process, waits forever, or returns garbage. The size of an
eager header depends only on the number of processes. It has what must be equal, and contains as much of the data as
fits; all further messages have sizes that the headers have shown to be equal.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import torch

from accel_state.transport.base import Transport, Work

__all__ = ("ALIGNMENT", "COMPARED_BYTES", "HEADER_BYTES", "EagerHeader", "HeaderFields", "eager_header_bytes")

ALIGNMENT: Final = 16
"""Alignment of the segments of a payload, in bytes: the size of complex128, so that every dtype can be read there."""

_LAYOUT: Final = struct.Struct("<QQQQ")
HEADER_BYTES: Final = _LAYOUT.size
"""Bytes of the fields before the payload, a multiple of `ALIGNMENT`."""

COMPARED_BYTES: Final = 16
"""Bytes at the start of the header that must be equal on all processes: fingerprint and flags."""

_MAX_HEADER_BYTES: Final = 48 * 1024
_MIN_HEADER_BYTES: Final = 1024
_RECEIVED_BYTES: Final = 256 * 1024


def eager_header_bytes(world_size: int) -> int:
    """Bytes of an eager header. It shrinks with the number of processes, because every process receives all of them.

    48 KiB for up to 5 processes, 256 KiB in all for up to 256, and 1 KiB for each beyond: 1 MiB for 1,024. The
    largest fits into one segment of the loopback device (64 KiB); a second segment costs a third more.
    """
    fair = _RECEIVED_BYTES // world_size // ALIGNMENT * ALIGNMENT
    return max(_MIN_HEADER_BYTES, min(_MAX_HEADER_BYTES, fair))


class HeaderFields(NamedTuple):
    """The fields of one process's header.

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


class EagerHeader:
    """The buffers of one process for its eager headers: the one that it sends, and those that it receives.

    Args:
        world_size: number of processes.

    Attributes:
        capacity: bytes of payload that fit.
        generation: how often the buffers were renewed; views of them are valid until it changes.
    """

    __slots__ = (
        "_compared",
        "_flat",
        "_memory",
        "_received",
        "_sent",
        "_size",
        "_table",
        "_world_size",
        "capacity",
        "generation",
    )

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._size = eager_header_bytes(world_size)
        self.capacity = self._size - HEADER_BYTES
        self.generation = 0
        self.renew()

    def renew(self) -> None:
        """Allocate new buffers, because an abandoned collective may still write to the old ones."""
        # Buffers that are created in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._sent = torch.zeros(self._size, dtype=torch.uint8)
            self._received = torch.empty(self._world_size, self._size, dtype=torch.uint8)
            # Cached: a backend's thread would release a view that was created for one call, and needs the GIL for that.
            self._flat = self._received.view(-1)
        self.generation += 1
        self._memory = memoryview(self._sent.numpy().data)
        self._table = self._received.numpy()
        self._compared = self._table[:, :COMPARED_BYTES]

    def own_payload(self, length: int) -> torch.Tensor:
        """The buffer for this process's payload, uint8 of shape (length,)."""
        return self._sent.narrow(0, HEADER_BYTES, length)

    def write(self, data: bytes) -> None:
        """Write bytes into this process's payload."""
        self._memory[HEADER_BYTES : HEADER_BYTES + len(data)] = data

    def all_gather(self, transport: Transport, fields: HeaderFields) -> Work:
        """Start to send this process's header and to receive those of all processes."""
        _LAYOUT.pack_into(self._memory, 0, fields.fingerprint, fields.flags, fields.length, fields.number)
        return transport.all_gather(self._flat, self._sent, header=True)

    def are_equal(self) -> bool:
        """Whether the fingerprints and flags that were received are those of this process."""
        return self._compared.tobytes() == bytes(self._memory[:COMPARED_BYTES]) * self._world_size

    def lengths(self) -> list[int]:
        """Bytes of payload that each process announced."""
        return [HeaderFields(*_LAYOUT.unpack_from(row)).length for row in self._table]

    def payloads(self, length: int) -> torch.Tensor:
        """The payloads that were received, uint8 of shape (world_size, length); the next call overwrites them."""
        return self._received.narrow(1, HEADER_BYTES, length)

    def payload_of(self, rank: int, length: int) -> bytes:
        """A copy of the payload of one process."""
        return self._table[rank, HEADER_BYTES : HEADER_BYTES + length].tobytes()
