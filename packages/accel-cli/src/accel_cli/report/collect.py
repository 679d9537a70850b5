"""Collects what a report shows of a run: curves, the time account, events, checkpoints and the record.

Each part of it may be missing: a run without a time account still has curves, and a damaged line costs that line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from accel_cli.checkpoints import checkpoint_place
from accel_cli.launch.failures import FAILURES
from accel_state.errors import AccelError
from accel_state.redaction import redact
from accel_state.untrusted import anything, dict_of, number, parse_json, read_limited, record
from accel_state.watch.goodput import account_history, read_goodput
from accel_state.watch.record import CATEGORIES, STEP
from accel_tracking.record import leaves_by_key, read_run_record
from accel_tracking.trackers.jsonl import read_run

__all__ = ("GUARD_EVENTS", "collect_run", "lines_of", "thinned")

GUARD_EVENTS: Final = "events.jsonl"
"""File in a project folder with one line for each bad step that the guard of steps saw."""

_MAX_EVENTS: Final = 2000
_MAX_FILE_BYTES: Final = 64 * 2**20
_MAX_VALUE_CHARACTERS: Final = 4000
_LINE_SHAPE: Final = record({"time": number()})

Points = list[tuple[float, float | None]]


def collect_run(run: str) -> dict[str, Any]:
    """What a report shows of a run, as plain data without secrets.

    Raises:
        SettingError: the folder does not exist.
        AccelError: there is nothing of a run in it.
    """
    report: dict[str, Any] = {"folder": run, "name": os.path.basename(os.path.abspath(run)), "curves": {}, "config": {}}
    problem: AccelError | None = None
    facts: dict[str, Any] = {}
    try:
        facts = read_run_record(run)
        report["folder"] = facts["folder"]
    except AccelError as error:
        problem = error
    with suppress(AccelError):
        logged = read_run(run)
        problem = None
        report |= {"config": redact(dict(logged.config)), "finished": logged.finished, "started": logged.started}
        report["curves"] = {name: _finite(points) for name, points in logged.curves().items()}
        report["progress"] = [(one.time, one.step) for one in logged.records if one.step is not None]
    goodput = _goodput(report["folder"])
    if problem is not None and goodput is None:
        raise problem
    attempts = facts.get("attempts", [])
    report |= {"goodput": goodput, "attempts": len(attempts), "checkpoints": _checkpoints(report["folder"])}
    report["events"] = sorted(_events(report, attempts), key=lambda event: event["time"])[-_MAX_EVENTS:]
    parts = {name: part for name, part in facts.items() if name not in ("settings", "folder", "attempts", "format")}
    report["record"] = {key: _short(value) for key, value in leaves_by_key(parts).items() if value not in (None, "")}
    report["settings"] = {
        name: (one.get("value"), one.get("source")) for name, one in facts.get("settings", {}).items()
    }
    return report


def _finite(points: Iterable[tuple[float, float]]) -> Points:
    return [(x, y if math.isfinite(y) else None) for x, y in points if math.isfinite(x)]


def _short(value: Any) -> Any:
    return (
        f"{value[:_MAX_VALUE_CHARACTERS]}..."
        if isinstance(value, str) and len(value) > _MAX_VALUE_CHARACTERS
        else value
    )


def thinned(points: Sequence[tuple[float, float | None]], most: int) -> Points:
    """At most about `most` points of a curve: the smallest and the largest value of each section, and its gaps.

    Example:
        >>> len(thinned([(x, float(x % 7)) for x in range(100_000)], 1000)) <= 1000
        True
    """
    if len(points) <= most:
        return list(points)
    sections = max(most // 3, 1)
    kept: dict[int, None] = {0: None}
    for section in range(sections):
        begin, end = section * len(points) // sections, (section + 1) * len(points) // sections
        values = [(y, i) for i in range(begin, end) if (y := points[i][1]) is not None]
        gap = next((i for i in range(begin, end) if points[i][1] is None), None)
        chosen = {*(() if gap is None else (gap,)), *((min(values)[1], max(values)[1]) if values else ())}
        kept.update(dict.fromkeys(sorted(chosen)))
    return [points[i] for i in sorted(kept)][:most]


def _goodput(folder: str) -> dict[str, Any] | None:
    """Seconds by category and rank, and goodput and memory over time."""
    try:
        summary = read_goodput(folder)
    except (AccelError, OSError):
        return None
    history = account_history(folder)
    over_time: Points = []
    done: dict[int, tuple[float, float]] = {}
    spent = dict.fromkeys(history, 0.0)
    for line, rank in sorted(((line, rank) for rank, lines in history.items() for line in lines), key=_moment):
        before = done.get(rank, (line["began"], 0.0))
        # Each start of a process counts its seconds from zero.
        spent[rank] += before[1] if before[0] != line["began"] else 0.0
        done[rank] = (line["began"], line["seconds"].get(CATEGORIES[STEP], 0.0))
        steps = sum(spent[one] + done.get(one, (0.0, 0.0))[1] for one in history) / len(history)
        if line["time"] > summary.began:
            over_time.append((line["time"], min(steps / (line["time"] - summary.began), 1.0)))
    memory = {
        f"{name} of rank {rank}": _megabytes(lines, key)
        for rank, lines in history.items()
        for key, name in (("memory", "memory"), ("device_memory", "device memory"))
    }
    return {
        "wall": summary.wall,
        "began": summary.began,
        "ended": summary.ended,
        "running": summary.running,
        "restarts": summary.restarts,
        "goodput": summary.goodput,
        "ranks": [(one.rank, {**one.seconds, "unattributed": one.unattributed}) for one in summary.ranks],
        "over_time": over_time,
        "memory": {name: points for name, points in memory.items() if points},
    }


def _megabytes(lines: Iterable[Mapping[str, Any]], key: str) -> Points:
    """A number of bytes over time, with a gap between two starts of the process."""
    points: Points = []
    began = None
    for line in lines:
        if _is_count(line.get(key)):
            if began not in (None, line["began"]):
                points.append((line["began"], None))
            began = line["began"]
            points.append((line["time"], line[key] / 2**20))
    return points


def _moment(entry: tuple[Mapping[str, Any], int]) -> tuple[float, int]:
    return float(entry[0]["time"]), entry[1]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**60


def _checkpoints(folder: str) -> list[dict[str, Any]]:
    try:
        return checkpoint_place(folder, "").table()
    except (AccelError, OSError):
        return []


def _events(report: Mapping[str, Any], attempts: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Saves, failures, restarts and bad steps, each with its time."""
    for row in report["checkpoints"]:
        if row["written"] is not None:
            yield {"time": row["written"], "kind": "save", "text": f"{row['name']}, {row['position'] or row['state']}"}
    for line in lines_of(report["folder"], FAILURES):
        step = (line.get("fingerprint") or {}).get("step")
        text = f"{line.get('kind', '')}: {line.get('message', '')} {line.get('reason', '')}"
        yield {"time": line["time"], "kind": "failure", "text": redact(text)[:500], "step": step}
    for attempt in attempts[1:]:
        changed = ", ".join(attempt.get("changed") or ())
        text = f"start {attempt.get('restarts', 0) + 1} on {attempt.get('host', '')}"
        yield {"time": attempt["time"], "kind": "restart", "text": text + (f"; changed: {changed}" if changed else "")}
    for line in lines_of(report["folder"], GUARD_EVENTS):
        parts = [str(line.get(name, "")) for name in ("kind", "quantity", "value")]
        more = [f"{name} {line[name]}" for name in ("action", "cause", "ranks", "samples") if line.get(name)]
        text = redact(f"{' '.join(filter(None, parts))}; {', '.join(more)}")[:500]
        yield {"time": line["time"], "kind": "guard", "text": text, "step": line.get("step")}


def lines_of(folder: str, name: str) -> Iterator[dict[str, Any]]:
    """The valid lines of a file of events."""
    try:
        texts = read_limited(os.path.join(folder, name), _MAX_FILE_BYTES).splitlines()
    except OSError:
        return
    for text in texts[-_MAX_EVENTS:]:
        with suppress(ValueError):
            line: dict[str, Any] = parse_json(text, dict_of(anything))
            if not _LINE_SHAPE(line):
                yield line
