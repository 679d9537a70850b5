"""Collectives that start now and are waited for later, behind the checked header of all collectives.

    pending = async_all_gather_bytes(data, "DataLoader.__next__")     # starts
    ...                                                             # computes meanwhile
    everyones = pending.wait()                                      # the bytes of all processes, by rank

A process that calls something else meanwhile gets the same error as all others. On one process nothing travels, so
these functions expect a run of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch

from accel_state import current
from accel_state.errors import AccelError, CollectiveError
from accel_state.protocol import HeaderCall, PendingCall, start_all_gather_bytes
from accel_state.transport.base import Transport

__all__ = (
    "PendingCall",
    "PendingScatter",
    "async_all_gather_bytes",
    "async_scatter",
    "begin_scatters",
    "transport_device",
)


def transport_device() -> torch.device:
    """The device of the tensors that travel between processes."""
    return current.process_or_start().transport.device


def async_all_gather_bytes(data: bytes, operation: str) -> PendingCall:
    """Start to gather a few bytes of every process; `wait` on the result returns those of all, by rank.

    Args:
        data: at most as many bytes as fit into a header, about 1 KiB; lengths may differ.
        operation: name of the function that the user called, for error messages.
    """
    return start_all_gather_bytes(current.process_or_start().transport, operation, data)


_broken: WeakSet[Transport] = WeakSet()
"""Transports on which a scatter failed, so that a message may still be under way."""


def begin_scatters(data: bytes, operation: str) -> list[bytes]:
    """Gather bytes of all processes that are about to exchange several scatters.

    Args:
        data: of this process; lengths may differ.
        operation: name of the function that the user called, for error messages.

    Returns:
        The bytes of all processes, by rank.

    Raises:
        ShapeMismatch: on every process, when one of them called something else.
        CollectiveError: a process is gone or did not come in time; or a scatter of this run failed earlier, and its
            message could be taken for the next one.
    """
    transport = current.process_or_start().transport
    with HeaderCall(transport, operation) as call:
        if transport in _broken:
            raise CollectiveError(
                f"Cannot begin {operation}.",
                "Some processes left an earlier one before its end, and its messages could be taken for those of this.",
                "Start the run anew, and let all processes iterate loaders to the same step.",
            )
        everyones: list[bytes] = call.all_gather_bytes(data)
    return everyones


def async_scatter(
    output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, operation: str, src: int = 0
) -> PendingScatter:
    """Start to send each process its own tensor out of those of one process.

    Args:
        output: receives this process's tensor; of the same size on all processes.
        inputs: the tensors of all processes, by rank, on process `src`; None on the others.
        operation: name of the function that the user called, for error messages.
        src: the process that sends.
    """
    return PendingScatter(output, inputs, operation, src)


class PendingScatter:
    """A scatter that was started; see `async_scatter`."""

    def __init__(self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, operation: str, src: int) -> None:
        self._transport = current.process_or_start().transport
        self._header = start_all_gather_bytes(self._transport, operation, b"")
        self._work = self._transport.scatter(output, inputs, src)

    def wait(self) -> None:
        """Return when the data have arrived.

        Raises:
            ShapeMismatch: on every process, when one of them called something else.
            CollectiveError: a process is gone or did not come in time.
        """
        try:
            self._header.wait((self._work,))
        except AccelError:
            _broken.add(self._transport)
            raise
