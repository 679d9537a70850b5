"""Collectives that start now and complete later, after the checked header of all collectives.

    pending = async_all_gather_bytes(data, "DataLoader.__next__")     # starts
    ...                                                             # compute meanwhile
    everyones = pending.wait()                                      # the bytes of all processes, by rank

If a process calls another collective meanwhile, all processes get the same error. This requires a run of several
processes.
"""

from __future__ import annotations

from accel_state import current
from accel_state.protocol.call import PendingCall, start_all_gather_bytes

__all__ = ("PendingCall", "async_all_gather_bytes")


def async_all_gather_bytes(data: bytes, operation: str) -> PendingCall:
    """Start to gather a few bytes of every process; `wait` on the result returns the bytes of all, by rank.

    Args:
        data: at most as many bytes as fit into a header, about 1 KiB; lengths may differ.
        operation: name of the function that the user called, for error messages.
    """
    return start_all_gather_bytes(current.process_or_start().transport, operation, data)
