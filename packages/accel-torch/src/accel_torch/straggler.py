"""Finds the process that the others wait for: one table at the end of a run with the time of each process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from accel_ops import gather_object
from accel_state.watch.record import STATUS_RECORD

__all__ = ("SHARES", "StragglerReport", "shares", "table")

SHARES: Final = ("start-up", "first step", "data", "step", "evaluation", "saving", "recomputed", "waiting")
"""Short names of `accel_state.watch.record.CATEGORIES`, in the same order; a process that reports is not down."""

_WAITING: Final = SHARES.index("waiting")


class StragglerReport:
    """The time of this process from now on, from its status record."""

    def __init__(self) -> None:
        self._before = self._seconds()

    def tell(self, log: Callable[[dict[str, float]], None] | None, prints: bool) -> None:
        """Log the shares of all processes and print them as a table; called on every process.

        Args:
            log: the function that logs values by name; None: no tracker runs.
            prints: whether this process prints the table.
        """
        mine = [now - before for now, before in zip(self._seconds(), self._before, strict=True)]
        everyones: list[list[float]] = gather_object([mine])
        if log is not None:
            log(shares(everyones))
        if prints:
            print(table(everyones))  # noqa: T201 - this is what it is for

    def _seconds(self) -> list[float]:
        # The numbers are those of the last change.
        STATUS_RECORD.enter(STATUS_RECORD.doing)
        return STATUS_RECORD.seconds[: len(SHARES)]


def shares(everyones: Sequence[Sequence[float]]) -> dict[str, float]:
    """The values to log: each share of each process, as a fraction of its time."""
    return {
        f"time_share/process_{rank}/{share}": spent / max(sum(seconds), 1e-9)
        for rank, seconds in enumerate(everyones)
        for share, spent in zip(SHARES, seconds, strict=True)
    }


def table(everyones: Sequence[Sequence[float]]) -> str:
    """A table with one line for each process, and the process that waits least: the others wait for it."""
    lines = [f"{'process':>7}{'seconds':>10}" + "".join(f"{share:>12}" for share in SHARES)]
    for rank, seconds in enumerate(everyones):
        total = max(sum(seconds), 1e-9)
        lines.append(f"{rank:>7}{total:>10.1f}" + "".join(f"{one / total:>12.1%}" for one in seconds))
    if len(everyones) > 1:
        waits = [seconds[_WAITING] for seconds in everyones]
        least = waits.index(min(waits))
        lines.append(f"Process {least} waits least ({min(waits):.1f} s; the most is {max(waits):.1f} s).")
    return "\n".join(lines)
