"""Experiment trackers behind one small interface."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel_tracking.base import (
        GeneralTracker,
        LibraryTracker,
        Tracker,
        is_main_process,
        on_main_process,
    )
    from accel_tracking.curves import (
        describe_run,
        plot_run,
    )
    from accel_tracking.group import (
        TrackerGroup,
    )
    from accel_tracking.registry import (
        LoggerType,
        LogWith,
        filter_trackers,
        get_available_trackers,
        register_tracker_class,
        tracker_class,
        tracker_names,
    )
    from accel_tracking.trackers.jsonl import (
        JSONLinesTracker,
        LogEntry,
        RunRecord,
        read_run,
    )

__all__ = (
    "GeneralTracker",
    "JSONLinesTracker",
    "LibraryTracker",
    "LogEntry",
    "LogWith",
    "LoggerType",
    "RunRecord",
    "Tracker",
    "TrackerGroup",
    "describe_run",
    "filter_trackers",
    "get_available_trackers",
    "is_main_process",
    "on_main_process",
    "plot_run",
    "read_run",
    "register_tracker_class",
    "tracker_class",
    "tracker_names",
)

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "accel_tracking.base": (
            "GeneralTracker",
            "LibraryTracker",
            "Tracker",
            "is_main_process",
            "on_main_process",
        ),
        "accel_tracking.curves": ("describe_run", "plot_run"),
        "accel_tracking.group": ("TrackerGroup",),
        "accel_tracking.registry": (
            "LogWith",
            "LoggerType",
            "filter_trackers",
            "get_available_trackers",
            "register_tracker_class",
            "tracker_class",
            "tracker_names",
        ),
        "accel_tracking.trackers.jsonl": ("JSONLinesTracker", "LogEntry", "RunRecord", "read_run"),
    },
)
