"""The last good values of a loss or of a norm, and the limit above which the next one is a spike."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable
from typing import Final

__all__ = ("History",)

_LEAST: Final = 5
"""Good values that precede a judged one."""

_CONSISTENT: Final = 1.4826
"""Median absolute deviations in a standard deviation of a normal distribution."""

_ROUNDING: Final = 1e-6
"""Smallest deviation, relative to the median: values that differ by rounding alone are not spikes."""


class History:
    """The last good values, of which the median and the median absolute deviation (MAD) follow.

    A value is a spike if it exceeds `median + spike * 1.4826 * MAD`, once five good values precede it.

    Args:
        window: the number of values.
        spike: see above.

    Example:
        >>> history = History(window=128, spike=10.0)
        >>> for value in (1.0, 1.1, 0.9, 1.2, 1.0):
        ...     history.add(value)
        >>> history.exceeded_by(2.0)
        >>> round(history.exceeded_by(9.0), 3)
        2.483
    """

    def __init__(self, window: int, spike: float) -> None:
        self._window, self._scale = window, spike * _CONSISTENT
        self.values: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        """Add a good value; the oldest one beyond the window is forgotten."""
        values, ordered = self.values, self._sorted
        if len(values) == self._window:
            del ordered[bisect_left(ordered, values.popleft())]
        values.append(value)
        insort(ordered, value)

    def replace(self, values: Iterable[float]) -> None:
        """Have other values."""
        self.values = deque(list(values)[-self._window :])
        self._sorted = sorted(self.values)

    def exceeded_by(self, value: float) -> float | None:
        """The limit, if the value exceeds it."""
        ordered = self._sorted
        count = len(ordered)
        if count < _LEAST:
            return None
        median = _median(ordered)
        if value <= median:
            return None
        # With at least this deviation the value is not a spike; counting is faster than computing the deviation.
        enough = (value - median) / self._scale
        nearer = bisect_left(ordered, median + enough) - bisect_right(ordered, median - enough)
        if nearer <= (count - 1) // 2:
            return None
        deviation = _median(sorted(abs(other - median) for other in ordered))
        limit = median + self._scale * max(deviation, _ROUNDING * abs(median))
        return limit if value > limit else None

    @property
    def is_rising(self) -> bool:
        """Whether the last value is the largest one, and far from most others."""
        if len(self.values) < _LEAST:
            return False
        last, median = self.values[-1], _median(self._sorted)
        deviation = _median(sorted(abs(other - median) for other in self._sorted))
        return last == self._sorted[-1] and last > median + 3 * _CONSISTENT * deviation


def _median(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
