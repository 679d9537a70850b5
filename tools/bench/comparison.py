"""What got slower or faster between two runs, beyond noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from bench.results import Row

FLOOR: Final = 0.05
"""The part of a figure by which it has to change at least: two runs on one machine differ by more than their turns."""

SPREADS: Final = 2.0
"""By how many times the sum of both spreads it has to change at least."""

FEWEST_TURNS: Final = 3
"""With fewer, the quartiles say nothing."""

RULE: Final = (
    f"A row changed when its figure moved by more than {FLOOR:.0%}, and by more than {SPREADS:g} times the sum of both "
    "spreads (half the distance between the quartiles of a run's turns)."
)


class Change(NamedTuple):
    """A row in two runs.

    Args:
        name: the row.
        before: its figure in the old run; None where the old run has no such row.
        now: its figure in the new run; None where the new run lacks it.
        noise: by how much it may differ without having changed.
        verdict: "slower", "faster", "same", "new", "missing", or why the two cannot be compared.
    """

    name: str
    before: float | None
    now: float | None
    noise: float
    verdict: str


def compared(old: Iterable[Row], new: Iterable[Row]) -> list[Change]:
    """The changes of all rows of two runs, in the order of the new one; missing rows come last."""
    before = {row.key: row for row in old}
    now = {row.key: row for row in new}
    missing = [Change(title(row), row.value, None, 0.0, "missing") for key, row in before.items() if key not in now]
    return [*(change(before, row) for row in now.values()), *missing]


def change(before: Mapping[tuple[str, str, str, str], Row], row: Row) -> Change:
    """How a row of the new run differs from that of the old one."""
    old = before.get(row.key)
    if old is None:
        return Change(title(row), None, row.value, 0.0, "new")
    noise = max(FLOOR * abs(old.value), SPREADS * (old.spread + row.spread))
    moved = row.value - old.value
    if old.turns < FEWEST_TURNS or row.turns < FEWEST_TURNS:
        verdict = "too few turns"
    elif "/" not in row.figure and old.machine != row.machine:
        verdict = "other machine"
    else:
        verdict = "same" if abs(moved) <= noise else "slower" if moved > 0 else "faster"
    return Change(title(row), old.value, row.value, noise, verdict)


def title(row: Row) -> str:
    """A row in words."""
    return f"{row.group}: {row.case} ({row.unit}, {row.figure})"


def report(changes: Iterable[Change]) -> str:
    """What changed, in lines; rows that stayed as they were are counted."""
    lines, same = [], 0
    for found in changes:
        if found.verdict == "same":
            same += 1
            continue
        before, now = ("none" if value is None else f"{value:.3g}" for value in (found.before, found.now))
        lines.append(f"{found.verdict}: {found.name}: {before} -> {now}, noise {found.noise:.2g}")
    return "\n".join([*sorted(lines), f"{same} rows are the same.", RULE])
