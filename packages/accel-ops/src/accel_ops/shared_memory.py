"""A message stream from one process to the others of its machine, through shared memory.

The memory is an anonymous file (memfd), which the system removes when the last process that has it open ends. A socket
between the source and each receiver transfers the file. After that the source sends a byte for each message that it has
written, and the receiver returns a byte for each that it has read. The socket also guarantees that a message is visible
before its byte. Messages have slots in a ring buffer, so that one can be written while another is read.

No headers are sent. A process that has waited for a second checks whether the other one has left the stream or waits in
another call. If so, it exchanges headers with all processes, which raises the same error on all of them.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import torch

from accel_state.protocol.call import HeaderCall
from accel_state.protocol.state import protocol_state
from accel_state.protocol.turn import is_raised_by_handler
from accel_state.transport.base import Transport

__all__ = ("Handshake", "SharedMemoryStream", "StreamCall")

_PAGE: Final = mmap.PAGESIZE
_PLACES: Final = 2
"""Slots of the ring: one message is read while the next is written. With more slots, the source would notice too late
that others have left the loop."""

_BYTE: Final = b"\1"
_BYTES_AT_ONCE: Final = 64
_RANK: Final = struct.Struct("q")
_CREDENTIALS: Final = struct.Struct("3i")
_SLICE: Final = 1.0
"""Seconds of waiting after which a process looks for the cause."""

_LOOKS: Final = 2
"""How many times in a row a process must be found in another call."""


class StreamCall(HeaderCall):
    """The steps of a message stream. Each process counts them, and the headers of other calls contain the count.

    Args:
        transport: the transport between the processes.
        operation: name of the function that the user called.
    """

    __slots__ = ()

    def __init__(self, transport: Transport, operation: str) -> None:
        super().__init__(transport, operation)
        # A step has no header. One that fails exchanges headers itself if the other processes must know.
        self._owes = 0

    def count(self) -> None:
        """Complete a step that need not wait."""
        log = self._state.log
        log.number += 1
        log.messages += 1

    def complete(self, ready: Callable[[float], bool]) -> None:
        """Complete a step that must wait.

        Args:
            ready: waits for at most the given seconds, and returns whether the step is complete; raises ConnectionError
                when another process has left the stream, or waits for this one in another call.

        Raises:
            ShapeMismatch: on every process, when one of them called another collective.
            CollectiveError: a process ended or did not call this in time.
        """
        with self:
            deadline = time.monotonic() + self._transport.timeout.total_seconds()
            try:
                while not ready(_SLICE):
                    if time.monotonic() > deadline:
                        raise self._failure(TimeoutError("The message did not arrive in time."))
            except ConnectionError as error:
                if is_raised_by_handler(error):
                    raise
                self._owes = 1
                self._exchange_headers(*self._header_only(), 0)
                raise self._failure(error) from error
            self._state.log.messages += 1


class Handshake:
    """Connects the processes of a machine: the source listens before the others connect.

    Args:
        transport: the transport between all processes.
        src: rank of the sending process.
    """

    def __init__(self, transport: Transport, src: int) -> None:
        self._transport = transport
        self._src = src
        self._socket: socket.socket | None = None
        self._file = -1
        self.address = b""
        """Address at which the source listens; empty if it does not."""

    def listen(self) -> None:
        """Accept connections of the others; only the source calls this."""
        if not _is_offered(self._transport):
            return
        address = b"\0accel/" + os.urandom(16).hex().encode()
        with suppress(OSError):
            self._file = os.memfd_create("accel")
            os.ftruncate(self._file, _head_bytes(self._transport))
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(self._transport.timeout.total_seconds())
            self._socket.bind(address)
            self._socket.listen(self._transport.world_size)
            self.address = address

    def connect(self, address: bytes) -> bool:
        """Whether this process can take part: it listens, or has connected to a source of the same user."""
        transport = self._transport
        if transport.rank == self._src:
            return bool(self.address)
        if not _is_offered(transport):
            return False
        source = self._socket = socket.socket(socket.AF_UNIX)
        try:
            # A source on this machine listens already.
            source.setblocking(False)
            source.connect(address)
            source.settimeout(transport.timeout.total_seconds())
            source.sendall(_RANK.pack(transport.rank))
        except OSError:
            return False
        return _has_our_user(source)

    def stream(self, operation: str, wrap: Callable[[torch.Tensor], Any]) -> SharedMemoryStream:
        """The stream, after all processes have connected; see `SharedMemoryStream`."""
        transport, found = self._transport, self._socket
        assert found is not None
        peers: dict[int, socket.socket] = {}
        if transport.rank != self._src:
            peers[self._src], self._socket = found, None
            self._file = socket.recv_fds(found, 1, 1)[1][0]
        while len(peers) < transport.world_size - 1 and transport.rank == self._src:
            peer, _ = found.accept()
            # Every process of the machine can see the address.
            if _has_our_user(peer):
                peers[_RANK.unpack(peer.recv(_RANK.size, socket.MSG_WAITALL))[0]] = peer
                socket.send_fds(peer, [_BYTE], [self._file])
        file, self._file = self._file, -1
        return SharedMemoryStream(transport, operation, wrap, self._src, peers, file)

    def end(self) -> None:
        """Close the socket and the file if no stream uses them."""
        if self._socket is not None:
            self._socket.close()
        if self._file >= 0:
            os.close(self._file)


def _is_offered(transport: Transport) -> bool:
    # A simulated world has no store.
    return sys.platform == "linux" and transport.device.type == "cpu" and transport.store() is not None


def _has_our_user(peer: socket.socket) -> bool:
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _head_bytes(transport: Transport) -> int:
    return -(-_RANK.size * transport.world_size // _PAGE) * _PAGE


class SharedMemoryStream:
    """The messages of one epoch, from the source to all others; see `accel_ops.pending.ScatterStream`.

    Args:
        transport: the transport between the processes.
        operation: name of the function that the user calls at each step.
        wrap: converts a tensor to the object that `buffers` and `wait` return.
        src: rank of the sending process.
        peers: sockets by the rank at the other end: those of all receivers, or that of the source.
        file: descriptor of the shared memory.
    """

    def __init__(
        self,
        transport: Transport,
        operation: str,
        wrap: Callable[[torch.Tensor], Any],
        src: int,
        peers: dict[int, socket.socket],
        file: int,
    ) -> None:
        self._call = StreamCall(transport, operation)
        self._wrap = wrap
        self._rank, self._src, self._receivers = transport.rank, src, transport.world_size - 1
        self._peers = dict(sorted(peers.items()))
        self._file = file
        self._pid = os.getpid()
        for peer in peers.values():
            peer.setblocking(False)
        # At the beginning of the memory: for how many header exchanges each process has begun to wait.
        self._end = _head_bytes(transport)
        self._waits = memoryview(mmap.mmap(file, self._end)).cast("q")
        state = protocol_state(transport)
        self._log, self._listeners, self._exchanges = state.log, state.listeners, state.log.exchanges
        self._listeners.append(self._publish)
        self._looks = 0
        # The ring: its offset, the bytes of each slot, and the number of its first message.
        self._start = self._size = self._first = 0
        self._buffers: list[list[Any]] = []
        # The next message to write or to read; and how many each receiver has read, or the source has written.
        self._next = 0
        self._done = dict.fromkeys(self._peers, 0)
        self._left = False

    def buffers(self, nbytes: int) -> Sequence[Any]:
        """Views of the next slot of the ring, which is enlarged if a message does not fit."""
        if nbytes > self._size:
            self._enlarge(nbytes)
            os.ftruncate(self._file, self._end)
            self._map()
        return self._buffers[(self._next - self._first) % _PLACES]

    def send(self) -> None:
        """Publish the written slot: one byte to each of the other processes."""
        self._next += 1
        for peer in self._peers.values():
            try:
                peer.send(_BYTE)
            except OSError:
                # It may have left after the previous step, as this process is about to.
                self._left = True

    def expect(self, nbytes: int) -> None:
        """Note that the next message needs a larger ring, which the source makes."""
        if nbytes > self._size:
            self._enlarge(nbytes)

    def wait(self) -> Any:
        """Wait for the byte of every other process, and return the view of the message; None on the source."""
        if not self._left and self._is_ready(0):
            self._call.count()
        else:
            self._call.complete(self._is_ready)
        if self._rank == self._src:
            return None
        if not self._buffers:
            # The source has extended the file by now.
            self._map()
        place = (self._next - self._first) % _PLACES
        self._next += 1
        return self._buffers[place][0]

    def release(self) -> None:
        """Send the source the byte that frees the slot."""
        with suppress(OSError):
            self._peers[self._src].send(_BYTE)

    def close(self) -> None:
        """Unmap the ring and close the connections; a forked child leaves those of its parent open."""
        if os.getpid() != self._pid:
            # A forked child must not end the connections of its parent.
            return
        self._listeners.remove(self._publish)
        self._buffers = []
        self._waits.release()
        for peer in self._peers.values():
            # Children that were forked meanwhile have the socket open too.
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()
        os.close(self._file)

    def _enlarge(self, nbytes: int) -> None:
        """Begin a new ring behind the last one, because its messages may still be read; equal in all processes."""
        self._size = -(-max(nbytes, 2 * self._size) // _PAGE) * _PAGE
        self._start, self._first = self._end, self._next
        self._end += self._size * _PLACES * self._receivers
        self._buffers = []

    def _map(self) -> None:
        shape = (_PLACES, self._receivers, self._size)
        memory = mmap.mmap(self._file, self._end)
        # Views that are created in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            ring = torch.frombuffer(memory, dtype=torch.uint8, offset=self._start).view(shape)
            mine = range(self._receivers)
            if self._rank != self._src:
                own = self._rank - (self._rank > self._src)
                mine = range(own, own + 1)
            self._buffers = [[self._wrap(place[index]) for index in mine] for place in ring]

    def _is_ready(self, seconds: float) -> bool:
        """Whether the next message has arrived; in the source, whether it may write another one."""
        if self._left:
            raise ConnectionResetError("A process has left the stream.")
        sends = self._rank == self._src
        if sends and self._next - self._first < _PLACES:
            return True
        wanted = self._next - _PLACES if sends else self._next
        for rank, peer in self._peers.items():
            if self._done[rank] <= wanted:
                self._take(rank, peer, seconds)
            if self._done[rank] <= wanted:
                return False
        self._looks = 0
        return True

    def _take(self, rank: int, peer: socket.socket, seconds: float) -> None:
        """Count the bytes that a peer has sent; wait for them for at most `seconds`."""
        try:
            if seconds and not _poll(peer, seconds):
                self._look(rank)
                return
            found = peer.recv(_BYTES_AT_ONCE)
        except BlockingIOError:
            return
        except OSError as error:
            if is_raised_by_handler(error):
                raise
            found = b""
        self._left = not found
        self._done[rank] += len(found)

    def _publish(self, exchanges: int) -> None:
        self._waits[self._rank] = exchanges - self._exchanges

    def _look(self, rank: int) -> None:
        """Raise if a peer waits in a call that this process is not in."""
        elsewhere = self._waits[rank] > self._log.exchanges - self._exchanges
        self._looks = self._looks + 1 if elsewhere else 0
        if self._looks == _LOOKS:
            raise ConnectionError(f"Process {rank} waits in another call.")


def _poll(peer: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(peer, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
