"""Where the main thread of this process is, as seen from another thread, and where an exception was raised.

The main thread is looked up only when a failure has to be explained: on Python 3.11 the frames of a running thread can
be left dangling when garbage is collected while another thread walks them, so it is done rarely, and no collection may
begin meanwhile.
"""

from __future__ import annotations

import gc
import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Final

from accel_state.hang_report.call_log import Location, locate
from accel_state.settings.extension import is_library

__all__ = ("IMPORT", "Place", "main_thread_place", "place_of")

IMPORT: Final = "import"
"""What a thread is inside of while it imports a module."""

_IMPORTING: Final = "<frozen importlib"

_DECORATORS: Final = frozenset({"_call_impl", "_wrapped_call_impl", "decorate_context", "inner", "wrapped", "wrapper"})
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
        outwards = []
        while frame is not None:
            outwards.append((frame, frame.f_lineno))
            frame = frame.f_back
        return _innermost(outwards)
    finally:
        if collecting:
            gc.enable()


def place_of(error: BaseException) -> Place | None:
    """Where an exception was raised; None where no code of the user was running."""
    inwards, trace = [], error.__traceback__
    while trace is not None:
        inwards.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return _innermost(inwards[::-1])


def _innermost(outwards: list[tuple[FrameType, int]]) -> Place | None:
    inside = ""
    for frame, line in outwards:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if is_library(module):
            inside = inside if code.co_name in _DECORATORS and inside else code.co_name
        elif module.partition(".")[0] not in sys.stdlib_module_names:
            return Place(locate(code.co_filename, line), inside)
        elif code.co_filename.startswith(_IMPORTING):
            inside = IMPORT
    return None
