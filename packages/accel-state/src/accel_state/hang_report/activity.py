"""What a process does instead of training, and how quickly it trains, as its monitor reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from accel_state.hang_report.call_log import Location

__all__ = ("Activity", "Pace")


class Activity(NamedTuple):
    """What a process does instead of training.

    Args:
        name: name of the activity, such as "saving".
        location: line of the user's code that began it.
        seconds: how long it has taken so far.
    """

    name: str
    location: Location
    seconds: float


class Pace(NamedTuple):
    """How quickly a process trains.

    Args:
        steps: number of optimizer steps so far.
        per_second: recent steps per second; 0 before two steps were seen.
        seconds: seconds since the last step was seen; 0 before the first one.
    """

    steps: int
    per_second: float
    seconds: float
