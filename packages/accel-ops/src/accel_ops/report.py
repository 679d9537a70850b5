"""Asking where all processes are, and what this one called; for debuggers, signal handlers and other tools."""

from __future__ import annotations

import time
from typing import Final

from accel_state import current
from accel_state.hang_report.call_log import Call
from accel_state.hang_report.sightings import describe
from accel_state.protocol.call import exchange_of

__all__ = ("recent_calls", "where_is_everyone")

_LONGEST_READ: Final = 2.0
"""Seconds for which an answer of the store is waited for."""


def where_is_everyone() -> str:
    """Where each process is, as far as it is known: its last collective, and the line of the user's code.

    Never waits for another process. What is known of the others is up to two seconds old. Among more than 16 processes
    nothing is read before somebody asks, so that the first call takes up to two seconds.
    """
    transport = current.process_or_start().transport
    watch = exchange_of(transport).watch
    asked = watch.ask()
    picture = watch.picture()
    while not watch.reads_unasked and picture.taken < asked and time.monotonic() < asked + _LONGEST_READ:
        time.sleep(0.02)
        picture = watch.picture()
    return describe(picture.sightings, transport.world_size, picture.ages)


def recent_calls(count: int | None = None) -> tuple[Call, ...]:
    """The newest collectives that this process completed, the newest last; all that are kept by default."""
    return exchange_of(current.process_or_start().transport).log.recent(count)
