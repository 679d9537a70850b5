"""`accel runs list [FOLDER]`: the runs of this user on this machine, and those that a folder stores."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel_state.errors import SettingError
from accel_state.untrusted import printable
from accel_state.watch.runs import running_runs

__all__ = ("list_runs",)

_HEADS = ("run", "state", "started", "steps", "where")


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
    rows = [_HEADS, *(tuple(printable(_text(run[head])) for head in _HEADS) for run in runs)]
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


def _text(value: object) -> str:
    """A cell: a dash for nothing, a local time for the seconds of a start, an integral step without a fraction."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(value)) if value > 1e8 else f"{value:g}"
    return str(value)
