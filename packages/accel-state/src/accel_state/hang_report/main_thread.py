"""Where the main thread of this process is, as seen from another thread.

Looked up only when a failure has to be explained: on Python 3.11 the frames of a running thread can be left dangling
when garbage is collected while another thread walks them, so it is done rarely, and no collection may begin meanwhile.
"""

from __future__ import annotations

import gc
import sys
import threading
from dataclasses import dataclass
from typing import Final

from accel_state.hang_report.call_log import Location, locate
from accel_state.settings.extension import is_library

__all__ = ("Place", "main_thread_place")

_DECORATORS: Final = frozenset({"wrapper", "wrapped", "inner", "decorate_context"})
"""Functions around the one whose name says something."""


@dataclass(frozen=True)
class Place:
    """Where a thread is.

    Args:
        location: the innermost line of the user's code.
        inside: the library function that was called there; empty when there is none.
    """

    location: Location
    inside: str


def main_thread_place() -> Place | None:
    """Where the main thread is; None when it runs no code of the user."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        inside = ""
        while frame is not None and is_library(frame.f_globals.get("__name__", "")):
            name = frame.f_code.co_name
            inside = inside if name in _DECORATORS and inside else name
            frame = frame.f_back
        return None if frame is None else Place(locate(frame.f_code.co_filename, frame.f_lineno), inside)
    finally:
        if collecting:
            gc.enable()
