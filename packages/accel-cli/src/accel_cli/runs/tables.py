"""The tables of `accel runs`: `list` of runs, `goodput` of a run by category, and `diff` of two runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from accel_cli.terminal import columns
from accel_state.errors import SettingError
from accel_state.untrusted import printable
from accel_state.watch.goodput import GoodputSummary, read_goodput
from accel_state.watch.runs import running_runs
from accel_tracking.difference import RunDifference, differences_of

__all__ = (
    "difference_lines",
    "goodput_json",
    "goodput_text",
    "list_runs",
    "show_difference",
    "show_goodput",
)

_LIST_HEADS = ("run", "state", "started", "steps", "where")


def list_runs(folder: str, as_json: bool = False) -> str:
    """Return the runs as a table, the newest first, or as one JSON object per line.

    Args:
        folder: searched for files of the tracker "jsonl", in all folders below it.
        as_json: for programs.

    Raises:
        SettingError: there is no such folder.
    """
    root = Path(folder)
    if not root.is_dir():
        raise SettingError(
            f"Cannot list the runs of {folder!r}.", "It is not a folder.", "Name a logging folder, or leave it out."
        )
    runs = sorted((*_running(), *_stored(root)), key=lambda run: -run["started"])
    if as_json:
        return "\n".join(json.dumps(run) for run in runs)
    if not runs:
        return f"No run of this user is running here, and {folder} contains none."
    rows = [_LIST_HEADS, *(tuple(printable(_cell(run[head])) for head in _LIST_HEADS) for run in runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _running() -> Iterator[dict[str, Any]]:
    for run in running_runs():
        yield {"run": str(run.pid), "state": "running", "started": run.began, "steps": None, "where": run.folder()}


def _stored(root: Path) -> Iterator[dict[str, Any]]:
    from accel_tracking.trackers.jsonl import read_runs

    for run in read_runs(root):
        steps = [entry.step for entry in run.records if entry.step is not None]
        state = "finished" if run.finished else "unfinished"
        steps_made = max(steps, default=None)
        yield {"run": run.name, "state": state, "started": run.started, "steps": steps_made, "where": str(run.path)}


def _cell(value: object) -> str:
    """A cell: a dash for nothing, a local time for the seconds of a start, an integral step without a fraction."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(value)) if value > 1e8 else f"{value:g}"
    return str(value)


# ---------------------------------------------------------------------- goodput


_BAR_CHARACTERS: Final = 20
"""Columns of a bar for the whole time."""

_MAX_RANKS: Final = 8
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
    ranks = [f"rank {one.rank}" for one in summary.ranks] if 1 < count <= _MAX_RANKS else []
    rows = list(_goodput_rows(summary))
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
        lines.append(
            f"{name:<{width}}{seconds:>10.1f}{share:>8.1%}{each}  {'#' * round(share * _BAR_CHARACTERS)}".rstrip()
        )
    if summary.damaged_lines:
        were = "s were" if summary.damaged_lines > 1 else " was"
        lines.append(f"{summary.damaged_lines} damaged line{were} skipped.")
    return "\n".join(lines)


def _goodput_rows(summary: GoodputSummary) -> Iterator[tuple[str, float, Sequence[float]]]:
    """Each category with its seconds: the mean over the processes, and each process."""
    for name, seconds in summary.seconds.items():
        yield name, seconds, [one.seconds[name] for one in summary.ranks]
    yield "unattributed", summary.unattributed, [one.unattributed for one in summary.ranks]


# ---------------------------------------------------------------------- diff


_MAX_VALUE_CHARACTERS: Final = 60


def show_difference(one: str, other: str, as_json: bool) -> int:
    """Print what differs, and return 1 if anything does, else 0.

    Raises:
        NotFound: a run has no record.
        SettingError: a record cannot be read.
    """
    difference = differences_of(one, other)
    if as_json:
        print(json.dumps(difference.to_json()))
    else:
        print("\n".join(difference_lines(difference)))
    return int(bool(difference.rows))


def difference_lines(difference: RunDifference) -> list[str]:
    """The differences as lines of a table, and the first step at which metrics differ."""
    rows = [(printable(row.key), *map(_shown, row.values)) for row in difference.rows]
    lines = columns(("key", *map(printable, difference.runs)), rows) if rows else ["Nothing differs."]
    if difference.first_step is not None:
        lines += ["", f"The metrics differ from step {difference.first_step:g} on."]
    if difference.not_compared:
        lines.append(f"Not compared, because they count time: {printable(', '.join(difference.not_compared))}.")
    return lines


def _shown(value: Any) -> str:
    text = "-" if value is None else printable(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[: _MAX_VALUE_CHARACTERS - 3]}..."
