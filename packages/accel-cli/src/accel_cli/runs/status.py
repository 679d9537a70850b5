"""`accel runs status [RUN]`: what every process of a run does now, as a table, as JSON, or repeatedly."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

from accel_state.errors import AccelError, NotFound
from accel_state.untrusted import printable
from accel_state.watch.processes import ProcessStatus, RunStatus, inspect_run
from accel_state.watch.runs import LaunchedRun, find_run, running_runs

__all__ = ("show_status",)

_WATCH_INTERVAL_S: Final = 1.0
"""Seconds between two tables of `--watch`."""

_CLEAR_SCREEN: Final = "\x1b[H\x1b[2J"
_COLUMN_HEADS: Final = ("rank", "host", "pid", "state", "steps/s", "memory", "device memory")
_MIN_SHOWN_DURATION_S: Final = 2.0
"""Seconds in one state after which the table shows its duration."""


def show_status(run: str | None, watch: bool, as_json: bool, stacks: bool) -> int:
    """Print where the processes are, and return the exit code: 1 if there is no such run.

    Args:
        run: the run that the user named; if None, every run of this user on this machine.
        watch: print the status every second until the run ends.
        as_json: print one JSON object for each run.
        stacks: add the Python stack of every process of this machine.
    """
    try:
        runs = _chosen(run)
    except AccelError as error:
        # One line, for scripts that pass it on.
        text = printable(f"{error.obstacle} {error.remedy}")
        print(f"accel runs status: {text}", file=sys.stderr)
        return 1
    clear = _CLEAR_SCREEN if watch and not as_json and sys.stdout.isatty() else ""
    show = _as_json if as_json else _as_text
    while True:
        _print(clear, [inspect_run(one, stacks) for one in runs], show)
        if not watch:
            return 0
        time.sleep(_WATCH_INTERVAL_S)
        left = {one.pid for one in running_runs()}
        runs = [one for one in runs if one.pid in left]
        if not runs:
            return 0


def _chosen(run: str | None) -> Sequence[LaunchedRun]:
    if run is not None:
        return [find_run(run)]
    runs = running_runs()
    if not runs:
        raise NotFound(
            "Cannot show the runs of this machine.",
            "No run that this user started with `accel launch` is running on this machine.",
            "Start one, or repeat the command on the machine of its launcher.",
        )
    return runs


def _print(clear: str, runs: Sequence[RunStatus], show: Callable[[RunStatus], str]) -> None:
    text = "\n".join(show(one) for one in runs)
    encoding = sys.stdout.encoding or "ascii"
    print(clear + text.encode(encoding, errors="replace").decode(encoding), flush=True)


def _as_json(status: RunStatus) -> str:
    return json.dumps(
        {
            "launcher": status.run.pid,
            "folder": status.run.folder(),
            "began": status.run.began,
            "world_size": status.world_size,
            "store_answers": status.store_answers,
            "held_up_by": status.held_up_by,
            "processes": [_without_stack(one) if not one.stack else asdict(one) for one in status.processes],
        }
    )


def _without_stack(process: ProcessStatus) -> dict[str, Any]:
    fields = asdict(process)
    del fields["stack"]
    return fields


def _as_text(status: RunStatus) -> str:
    rows = [_COLUMN_HEADS, *map(_row, status.processes)]
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_headline(status)]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if status.held_up_by:
        lines.append(f"The others wait for rank {', '.join(map(str, status.held_up_by))}.")
    if status.store_answers is False:
        lines.append(
            "The store of the run does not answer, so this shows the last known state of processes on other machines."
        )
    lines += [f"rank {one.rank}: the last bad step was {one.bad_step}." for one in status.processes if one.bad_step]
    for process in status.processes:
        if process.stack:
            lines += ["", f"rank {process.rank} (pid {process.pid}):", process.stack.rstrip()]
    return printable("\n".join(lines), keep="\n\t") + "\n"


def _headline(status: RunStatus) -> str:
    count = f"{status.world_size} process{'es' if status.world_size > 1 else ''}"
    since = _duration(time.time() - status.run.began)
    folder = os.path.relpath(status.run.folder())
    return f"Run of launcher {status.run.pid} in {folder}: {count}, for {since}"


def _row(process: ProcessStatus) -> tuple[str, ...]:
    pace = process.steps_per_second
    return (
        str(process.rank),
        process.host or "?",
        str(process.pid or "?"),
        _state(process),
        "" if pace is None else f"{pace:.3g}",
        _mebibytes(process.memory),
        _mebibytes(process.device_memory),
    )


def _mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.0f} MiB"


def _state(process: ProcessStatus) -> str:
    """Such as "in collective gather() at train.py:13 for 12 s"."""
    text = process.state
    if text == "in step":
        text += f" {process.steps + 1}"
    name = process.operation
    if name:
        text += f" {name if '(' in name else name + '()'}" if text != "stopped" else f", in {name}()"
    if process.at:
        text += f" at {process.at}"
    if process.seconds is not None and process.seconds >= _MIN_SHOWN_DURATION_S:
        text += f" for {_duration(process.seconds)}"
    if process.steps and process.state != "in step":
        text += f" (step {process.steps + 1})"
    return text


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
