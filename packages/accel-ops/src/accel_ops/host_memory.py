"""Sends large tensors between processes of one machine through shared memory.

Each process has an anonymous file (memfd), which the system removes when the last process that has it open ends. A
process copies its tensors there before it sends the header of a call, and the others copy them from there afterwards.
Two copies in memory take a fraction of the time of a socket, and need no further message.

The file has two slots, which are used in turn; the header contains the slot. A process reuses a slot only two calls
later, when the headers of the call in between have arrived. The others sent those headers after they had read the slot.

A process allocates the memory before it writes: if the system does not overcommit memory, a page that it cannot provide
would end the process by SIGBUS. If there is no memory, the header reports it, and the tensors are sent instead.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import stat
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import torch

from accel_ops.packing import as_bytes
from accel_state.protocol.state import ProtocolState
from accel_state.transport.base import Transport

__all__ = ("NO_SLOT", "HostMemory", "host_memory", "is_negotiated", "negotiate")

NO_SLOT: Final = 2
"""Slot of a process that has no memory for its tensors."""

_SLOT_BYTES: Final = 64 * 1024 * 1024
"""Bytes of a slot. Memory is allocated when it is first written to."""

_MAX_PROCESSES: Final = 16
"""Maximum number of processes that share memory, because each reads from all others."""

_ALIGNMENT_BYTES: Final = 64
_SLOTS: Final = 2
_FILE_BYTES: Final = _SLOTS * _SLOT_BYTES
_TOKEN_BYTES: Final = 16


class _Offer(NamedTuple):
    """How the other processes find the memory of a process: the path of the file in `/proc`, and its first bytes."""

    host: str
    pid: int
    descriptor: int
    token: str

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.descriptor}"


class HostMemory:
    """The memory of all processes of a transport.

    Args:
        rank: index of this process in the transport.
        files: descriptors of the files of all processes, by rank.

    Raises:
        OSError: the system cannot map them.
    """

    __slots__ = ("__weakref__", "_file", "_memories", "_rank", "_slot", "_taken")

    def __init__(self, rank: int, files: Sequence[int]) -> None:
        self._rank = rank
        self._slot = 0
        # Bytes of each slot that this process has allocated.
        self._taken = [0] * _SLOTS
        self._file = os.dup(files[rank])
        weakref.finalize(self, os.close, self._file)
        # Tensors that are created in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self._memories = [torch.frombuffer(mmap.mmap(file, _FILE_BYTES), dtype=torch.uint8) for file in files]

    def write(self, tensors: Sequence[torch.Tensor]) -> int:
        """Copy contiguous tensors into a slot for the other processes; return the slot, or `NO_SLOT`."""
        slot = (self._slot + 1) % _SLOTS
        if not self._take(slot, sum(_aligned(tensor.nbytes) for tensor in tensors)):
            return NO_SLOT
        self._slot = slot
        for tensor, memory in zip(tensors, self.read(self._rank, self._slot, tensors), strict=True):
            memory.copy_(as_bytes(tensor))
        return self._slot

    def _take(self, slot: int, nbytes: int) -> bool:
        """Allocate the first bytes of a slot; return whether there was enough memory."""
        taken = self._taken[slot]
        if nbytes > taken:
            try:
                os.posix_fallocate(self._file, slot * _SLOT_BYTES + taken, nbytes - taken)
            except OSError:
                return False
            self._taken[slot] = nbytes
        return True

    def read(self, rank: int, slot: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that a process wrote to a slot, as bytes; `like` are tensors of the same sizes."""
        at, views = slot * _SLOT_BYTES, []
        for tensor in like:
            views.append(self._memories[rank].narrow(0, at, tensor.nbytes))
            at += _aligned(tensor.nbytes)
        return views

    @staticmethod
    def fits(tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a slot has room for tensors."""
        return sum(_aligned(tensor.nbytes) for tensor in tensors) <= _SLOT_BYTES


_negotiated: weakref.WeakKeyDictionary[ProtocolState, HostMemory | None] = weakref.WeakKeyDictionary()


def host_memory(state: ProtocolState) -> HostMemory | None:
    """The shared memory of a transport, from its state; None if there is none, or `negotiate` was not called yet."""
    return _negotiated.get(state)


def is_negotiated(state: ProtocolState, transport: Transport) -> bool:
    """Whether the processes have found out if they can share memory; equal on all of them."""
    return state in _negotiated or transport.world_size > _MAX_PROCESSES or transport.device.type != "cpu"


def negotiate(state: ProtocolState, transport: Transport, all_gather_bytes: Callable[[bytes], list[bytes]]) -> None:
    """Find out whether the processes can share memory; all of them must call this at the same time.

    Args:
        state: the state of the transport.
        transport: the transport between the processes.
        all_gather_bytes: gathers bytes of every process on all processes, by rank.
    """
    files: list[int] = []
    token = os.urandom(_TOKEN_BYTES)
    own = _own_file(transport, token)
    memory = None
    try:
        offer = _Offer(socket.gethostname(), os.getpid(), own, token.hex())
        offers = all_gather_bytes(json.dumps(offer).encode() if own >= 0 else b"")
        if all(offers):
            files = [_opened(_Offer(*json.loads(text)), offer.host) for text in offers]
            # One process may lack address space or memory.
            with suppress(OSError):
                memory = HostMemory(transport.rank, files) if min(files) >= 0 else None
        opened = all_gather_bytes(b"\1" if memory is not None else b"")
        _negotiated[state] = memory if all(opened) else None
    finally:
        for file in (own, *files):
            if file >= 0:
                os.close(file)


def _own_file(transport: Transport, token: bytes) -> int:
    """A descriptor of a new file that begins with the token; -1 if it cannot be created."""
    # A simulated world has no store, and no other processes.
    if sys.platform != "linux" or transport.store() is None:
        return -1
    with suppress(OSError):
        file = os.memfd_create("accel")
        with suppress(OSError):
            os.ftruncate(file, _FILE_BYTES)
            os.pwrite(file, token, 0)
            return file
        os.close(file)
    return -1


def _opened(offer: _Offer, host: str) -> int:
    """A descriptor of the file of another process; -1 if it cannot be opened here."""
    if offer.host != host:
        return -1
    with suppress(OSError):
        status = os.stat(offer.path)
        # Opening something other than a file, such as a device, may have side effects.
        if not stat.S_ISREG(status.st_mode) or status.st_size != _FILE_BYTES:
            return -1
        file = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        with suppress(OSError):
            # A process of another container may have the same process id.
            if os.pread(file, _TOKEN_BYTES, 0).hex() == offer.token:
                return file
        os.close(file)
    return -1


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
