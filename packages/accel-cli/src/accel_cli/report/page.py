"""The page of a report: one HTML file with everything in it, readable without scripts."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from accel_cli.report.collect import collect_run, thinned
from accel_state.errors import AccelError, SettingError
from accel_state.untrusted import printable
from accel_tracking.difference import RunDifference, differences_of

__all__ = (
    "LIMIT",
    "report_page",
    "show_report",
    "write_report",
)

LIMIT: Final = 1_900_000
"""Largest number of characters of a page."""

_TEMPLATE_FOLDER: Final = Path(__file__).parent
_MAX_CURVES: Final = 150
_MAX_POINTS: Final = 40_000
_MIN_POINTS_PER_CURVE: Final = 30
_STATIC_POINTS: Final = 200
_MAX_ROWS: Final = 1000
_WIDTH, _HEIGHT, _EDGE = 360, 150, 4

_EVENT_KINDS: Final = ("save", "failure", "restart", "guard")


def report_page(runs: Sequence[Mapping[str, Any]], difference: RunDifference | None = None, refresh: int = 0) -> str:
    """The page.

    Args:
        runs: what `collect_run` returned for each.
        difference: what differs between two runs, or None.
        refresh: seconds after which a browser reads the file again; 0 for never.
    """
    points, rows = _MAX_POINTS, _MAX_ROWS
    while True:
        page = _page(runs, difference, refresh, points, rows)
        if len(page) < LIMIT or points < _MIN_POINTS_PER_CURVE:
            return page
        points, rows = points // 2, max(rows // 2, 50)


def _page(
    runs: Sequence[Mapping[str, Any]], difference: RunDifference | None, refresh: int, points: int, rows: int
) -> str:
    charts = list(_charts(runs, points))
    data = {"runs": [run["name"] for run in runs], "charts": charts, "marks": [_marks(run) for run in runs]}
    title = " and ".join(escape(run["name"]) for run in runs)
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    css, script = (_TEMPLATE_FOLDER / "page.css").read_text("utf-8"), (_TEMPLATE_FOLDER / "page.js").read_text("utf-8")
    library, library_css = (
        (_TEMPLATE_FOLDER / "uplot" / name).read_text("utf-8") for name in ("uPlot.iife.min.js", "uPlot.min.css")
    )
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}: report</title>{again}',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{library_css}\n{css}</style></head><body><header><h1>{title}</h1>",
        *map(_headline, range(len(runs)), runs),
        "</header><main>",
        _curves(runs, charts),
        *(_timeline(number, run, charts) for number, run in enumerate(runs)),
        *(_seconds(run) for run in runs if run["goodput"]),
        *(_checkpoints(run, rows) for run in runs if run["checkpoints"]),
        "" if difference is None else _difference(difference, rows),
        _settings(runs, rows),
        f"</main><footer>Written {_when(time.time())} by <code>accel runs report</code>.</footer>",
        f'<script type="application/json" id="data">{embedded}</script>',
        f"<script>{library}</script><script>{script}</script></body></html>\n",
    ]
    return "\n".join(filter(None, parts))


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _headline(number: int, run: Mapping[str, Any]) -> str:
    goodput = run["goodput"] or {}
    running = goodput.get("running", False)
    state = "running" if running else "finished" if run.get("finished") else "ended before its end"
    facts = [
        f"started {_when(run['started'])}" if run.get("started") else "",
        state if running or "finished" in run else "",
    ]
    if goodput:
        restarts = goodput["restarts"]
        facts += [
            f"{goodput['wall']:.0f} s",
            f"goodput {goodput['goodput']:.1%}",
            f"{restarts} restart{'' if restarts == 1 else 's'}",
        ]
    guards = sum(event["kind"] == "guard" for event in run["events"])
    facts.append(f"{guards} bad step{'' if guards == 1 else 's'}" if guards else "")
    shown = " · ".join(filter(None, facts))
    return f'<p class="run"><span class="key run-{number % 6}"></span><b>{escape(run["name"])}</b> {shown}<br>' + (
        f'<span class="path">{escape(run["folder"])}</span></p>'
    )


# ---------------------------------------------------------------------- curves


def _charts(runs: Sequence[Mapping[str, Any]], points: int) -> Iterator[dict[str, Any]]:
    """The charts that the script draws: a curve of all runs, then goodput and memory of each run over time."""
    names = list(dict.fromkeys(name for run in runs for name in run["curves"]))[:_MAX_CURVES]
    most = max(min(1500, points // max(len(names) * len(runs), 1)), _MIN_POINTS_PER_CURVE)
    for name in names:
        lines = [thinned(run["curves"].get(name, ()), most) for run in runs]
        yield {"kind": "curve", "name": name, "lines": [_rounded(line) for line in lines]}
    for number, run in enumerate(runs):
        goodput = run["goodput"] or {}
        over_time: dict[str, Any] = {"step": run.get("progress") or []}
        if goodput.get("over_time"):
            over_time = {"goodput": [(x, None if y is None else 100 * y) for x, y in goodput["over_time"]], **over_time}
        moments = [event["time"] for event in run["events"]]
        if any(over_time.values()) or moments:
            name = "goodput in % and step" if "goodput" in over_time else "step"
            yield _over_time("timeline", name, number, over_time, most, moments)
        if goodput.get("memory"):
            yield _over_time("memory", "memory in MiB", number, goodput["memory"], most, ())


def _over_time(
    kind: str, name: str, number: int, lines: Mapping[str, Any], most: int, moments: Iterable[float]
) -> dict[str, Any]:
    named = {label: line for label, line in lines.items() if line}
    ends = [x for line in named.values() for x, _ in line] + list(moments)
    return {
        "kind": kind,
        "name": name,
        "run": number,
        "labels": list(named),
        "span": [min(ends), max(ends)],
        "lines": [_rounded(thinned(line, most)) for line in named.values()],
    }


def _rounded(points: Iterable[tuple[float, float | None]]) -> list[list[float | None]]:
    """The points as two columns; times keep their milliseconds, and values six digits."""
    pairs = sorted(points, key=lambda point: point[0])
    return [[_number(x, 14) for x, _ in pairs], [None if y is None else _number(y, 6) for _, y in pairs]]


def _number(value: float, digits: int) -> float:
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


def _marks(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"x": round(event["time"], 3), "kind": event["kind"], "text": event["text"]} for event in run["events"]]


def _curves(runs: Sequence[Mapping[str, Any]], charts: Sequence[Mapping[str, Any]]) -> str:
    curves = [(number, chart) for number, chart in enumerate(charts) if chart["kind"] == "curve"]
    every = len({name for run in runs for name in run["curves"]})
    if not curves:
        return "<section><h2>Curves</h2><p>The run logged no numbers.</p></section>"
    left_out = f"<p>{every - len(curves)} more curves are left out.</p>" if every > len(curves) else ""
    figures = "".join(_figure(number, chart) for number, chart in curves)
    return (
        '<section><h2>Curves</h2><div class="controls" hidden><label>Find <input id="find" type="search"></label>'
        '<label>Smoothing <input id="smooth" type="range" min="0" max="0.99" step="0.01" value="0"></label>'
        '<label><input id="log" type="checkbox"> Logarithmic</label>'
        '<button id="reset" type="button">Whole range</button>'
        '<span class="hint">Drag to zoom; with the keyboard: arrows, + and -, 0.</span></div>'
        f'<div class="charts">{figures}</div>{left_out}</section>'
    )


def _figure(number: int, chart: Mapping[str, Any], events: Iterable[Mapping[str, Any]] = ()) -> str:
    """A chart as a static picture, which the script replaces by one to zoom in."""
    name = escape(chart["name"])
    lines = [list(zip(*line, strict=True)) for line in chart["lines"]]
    picture = _svg(lines, name, chart.get("span"), events)
    return (
        f'<figure data-name="{name}"><figcaption>{name}</figcaption>'
        f'<div class="chart {chart["kind"]}" data-chart="{number}">{picture}</div></figure>'
    )


def _svg(
    lines: Sequence[Sequence[tuple[Any, Any]]],
    name: str,
    span: Sequence[float] | None,
    events: Iterable[Mapping[str, Any]],
) -> str:
    drawn = [thinned(line, _STATIC_POINTS) for line in lines]
    xs = [x for line in drawn for x, _ in line] + list(span or ())
    ys = [y for line in drawn for _, y in line if y is not None]
    (left, right), (low, high) = ((min(v, default=0.0), max(v, default=1.0)) for v in (xs, ys))
    width, height = right - left or 1.0, high - low or 1.0

    def place(x: float, y: float) -> str:
        across = _EDGE + (x - left) / width * (_WIDTH - 2 * _EDGE)
        return f"{across:.1f},{_HEIGHT - 16 - (y - low) / height * (_HEIGHT - 34):.1f}"

    paths = []
    for number, line in enumerate(drawn):
        path, pen = [], "M"
        for x, y in line:
            if y is None or not math.isfinite(y):
                pen = "M"
            else:
                path.append(pen + place(x, y))
                pen = "L"
        paths.append(f'<path class="run-{number % 6}" d="{"".join(path)}"/>')
    marks = "".join(
        f'<path class="mark {event["kind"]}" d="M{place(event["time"], low)}V14"><title>{escape(event["kind"])}: '
        f"{escape(event['text'])}</title></path>"
        for event in list(events)[:500]
    )
    ends = f"{left:g} to {right:g}" if span is None else f"{_when(left)} to {_when(right)}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}">'
        f'<text x="{_EDGE}" y="11">{high:.5g}</text><text x="{_EDGE}" y="{_HEIGHT - 3}">{low:.5g}</text>'
        f'<text x="{_WIDTH - _EDGE}" y="{_HEIGHT - 3}" text-anchor="end">{ends}</text>{"".join(paths)}{marks}</svg>'
    )


# ---------------------------------------------------------------------- time, checkpoints, settings


def _timeline(run_number: int, run: Mapping[str, Any], charts: Sequence[Mapping[str, Any]]) -> str:
    own = [(n, c) for n, c in enumerate(charts) if c["kind"] in ("timeline", "memory") and c["run"] == run_number]
    if not own:
        return ""
    figures = "".join(_figure(n, c, run["events"] if c["kind"] == "timeline" else ()) for n, c in own)
    counts = {kind: sum(event["kind"] == kind for event in run["events"]) for kind in _EVENT_KINDS}
    key = " ".join(f'<span class="mark {kind}">{kind} ({count})</span>' for kind, count in counts.items() if count)
    rows = [
        (
            _when(event["time"]),
            f'<span class="mark {event["kind"]}">{event["kind"]}</span>',
            _step(event),
            escape(event["text"]),
        )
        for event in run["events"]
    ]
    table = _table(("time", "event", "step", ""), rows) if rows else ""
    details = f"<details><summary>{len(rows)} events</summary>{table}</details>" if rows else ""
    name = escape(run["name"])
    shown = f'<p class="marks">{key}</p><div class="wide">{figures}</div>{details}'
    return f"<section><h2>Time of {name}</h2>{shown}</section>"


def _step(event: Mapping[str, Any]) -> str:
    return "" if event.get("step") is None else escape(str(event["step"]))


def _seconds(run: Mapping[str, Any]) -> str:
    """The seconds by category of each rank, as bars, and the slowest rank."""
    goodput = run["goodput"]
    ranks, wall = goodput["ranks"], goodput["wall"] or 1.0
    names = [name for name in ranks[0][1] if any(seconds[name] >= 0.05 for _, seconds in ranks)]
    waiting = "waiting for other processes"
    slowest = min(ranks, key=lambda rank: rank[1][waiting])[0] if len(ranks) > 1 else None
    said = "" if slowest is None else f"<p>Rank {slowest} waited least for the others: it is the slowest.</p>"
    key = " ".join(f'<span class="swatch c{number}">{name}</span>' for number, name in enumerate(names))
    rows = []
    for rank, seconds in ranks[:256]:
        bars = "".join(
            f'<i class="c{number}" style="width:{100 * seconds[name] / wall:.3f}%"'
            f' title="{name}: {seconds[name]:.1f} s"></i>'
            for number, name in enumerate(names)
        )
        bold = " (slowest)" if rank == slowest else ""
        cells = [f"{seconds[name]:.1f}" for name in names]
        rows.append((f"{rank}{bold}", f'<span class="bar">{bars}</span>', *cells))
    table = _table(("rank", "share", *names), rows)
    return f"<section><h2>Seconds of {escape(run['name'])} by category</h2>{said}<p>{key}</p>{table}</section>"


def _checkpoints(run: Mapping[str, Any], most: int) -> str:
    rows = [
        (
            escape(row["name"]),
            escape(row["position"] or "-"),
            f"{row['size'] / 2**20:.2f} MiB",
            "-" if row["written"] is None else _when(row["written"]),
            escape(row["state"]),
        )
        for row in run["checkpoints"][-most:]
    ]
    table = _table(("checkpoint", "position", "size", "written", "verification"), rows)
    return f"<section><h2>Checkpoints of {escape(run['name'])}</h2>{table}</section>"


def _difference(difference: RunDifference, most: int) -> str:
    rows = [(escape(row.key), *(escape(_text(value)) for value in row.values)) for row in difference.rows[:most]]
    first = difference.first_step
    said = "" if first is None else f"<p>The metrics differ from step {first:g} on.</p>"
    table = _table(("key", *map(escape, difference.runs)), rows) if rows else "<p>Nothing differs.</p>"
    return f"<section><h2>Differences</h2>{said}{table}</section>"


def _settings(runs: Sequence[Mapping[str, Any]], most: int) -> str:
    parts = []
    for run in runs:
        settings = [(escape(name), escape(_text(v)), escape(str(s))) for name, (v, s) in run["settings"].items()]
        settings += [
            (escape(str(name)), escape(_text(value)), "hyperparameter") for name, value in run["config"].items()
        ]
        settings += [(escape(key), escape(_text(value)), "record") for key, value in run["record"].items()]
        if settings:
            table = _table(("name", "value", "from"), settings[:most])
            parts.append(f"<h3>{escape(run['name'])}</h3>{table}")
    if not parts:
        return ""
    search = '<label class="controls" hidden>Find <input id="search" type="search"></label>'
    return f'<section id="settings"><h2>Settings and record</h2>{search}{"".join(parts)}</section>'


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are HTML already."""
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


# ---------------------------------------------------------------------- writing


_WATCH_INTERVAL_S: Final = 5


def write_report(runs: Sequence[str], output: Path, refresh: int = 0) -> bool:
    """Write the report of runs, and return whether one of them still runs.

    Raises:
        AccelError: a folder has no run.
        SettingError: the file cannot be written.
    """
    collected = [collect_run(run) for run in runs]
    difference = None
    if len(runs) == 2:
        try:
            difference = differences_of(runs[0], runs[1])
        except AccelError:
            # A run from before there were records has curves to compare.
            difference = None
    running = any((run["goodput"] or {}).get("running") for run in collected)
    page = report_page(collected, difference, refresh if running else 0)
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        partial.write_text(page, encoding="utf-8")
        os.replace(partial, output)
    except OSError as error:
        failure = f"Cannot write the report {str(output)!r}."
        raise SettingError(failure, f"The system reports: {error}.", "Choose another file with -o.") from error
    return running


def show_report(runs: Sequence[str], output: Path, watch: bool) -> int:
    """Write the report, and write it again every few seconds while a run goes on; return the exit code."""
    running = write_report(runs, output, _WATCH_INTERVAL_S if watch else 0)
    print(printable(f"Report written to {output}"), flush=True)
    while watch and running:
        time.sleep(_WATCH_INTERVAL_S)
        running = write_report(runs, output, _WATCH_INTERVAL_S)
    return 0
