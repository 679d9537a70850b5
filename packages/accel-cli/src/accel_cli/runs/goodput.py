"""`accel runs goodput RUN`: where the time of a run went, as a table with a bar for each category, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Final

from accel_state.untrusted import printable
from accel_state.watch.goodput import GoodputSummary, read_goodput

__all__ = ("goodput_json", "goodput_text", "show_goodput")

_BAR: Final = 20
"""Columns of a bar for the whole time."""

_MOST_RANKS: Final = 8
"""Largest number of processes that have columns of their own."""


def show_goodput(run: str, as_json: bool = False) -> int:
    """Print where the time of a run went, and return the exit code.

    Args:
        run: the run's folder.
        as_json: print one line of JSON.

    Raises:
        NotFound: the folder does not exist, or contains no time accounts.
        SettingError: none of the accounts' lines can be read.
    """
    summary = read_goodput(run)
    print(goodput_json(summary) if as_json else goodput_text(summary))
    return 0


def goodput_json(summary: GoodputSummary) -> str:
    """The summary as one line of JSON; times in seconds."""
    figures = ("wall", "restarts", "goodput", "seconds", "unattributed")
    return json.dumps({**asdict(summary), **{name: getattr(summary, name) for name in figures}})


def goodput_text(summary: GoodputSummary) -> str:
    """A headline, and a table with one line for each category."""
    count = len(summary.ranks)
    restarts = f"{summary.restarts} restart{'s' if summary.restarts != 1 else ''}"
    state = "running for" if summary.running else "ran for"
    ranks = [f"rank {one.rank}" for one in summary.ranks] if 1 < count <= _MOST_RANKS else []
    rows = list(_rows(summary))
    width = max(len(name) for name, _, _ in rows)
    lines = [
        printable(
            f"{summary.folder}: {count} process{'es' if count > 1 else ''} {state} {summary.wall:.1f} s, {restarts}; "
            f"goodput {summary.goodput:.1%}"
        ),
        f"{'':<{width}}{'seconds':>10}{'share':>8}" + "".join(f"{rank:>10}" for rank in ranks),
    ]
    for name, seconds, own in rows:
        share = seconds / summary.wall if summary.wall else 0.0
        each = "".join(f"{one:>10.1f}" for one in own) if ranks else ""
        lines.append(f"{name:<{width}}{seconds:>10.1f}{share:>8.1%}{each}  {'#' * round(share * _BAR)}".rstrip())
    if summary.damaged_lines:
        were = "s were" if summary.damaged_lines > 1 else " was"
        lines.append(f"{summary.damaged_lines} damaged line{were} skipped.")
    return "\n".join(lines)


def _rows(summary: GoodputSummary) -> Iterator[tuple[str, float, Sequence[float]]]:
    """Each category with its seconds: the mean over the processes, and each process."""
    for name, seconds in summary.seconds.items():
        yield name, seconds, [one.seconds[name] for one in summary.ranks]
    yield "unattributed", summary.unattributed, [one.unattributed for one in summary.ranks]
