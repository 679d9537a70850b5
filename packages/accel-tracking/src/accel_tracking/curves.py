"""Curves of a run: as text, with a sparkline for each metric, and as a picture that matplotlib draws."""

from __future__ import annotations

import base64
import html
import io
import itertools
import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from accel_state.errors import SettingError
from accel_state.settings.installed import Requirement
from accel_tracking.trackers.jsonl import RunRecord

__all__ = ("MATPLOTLIB", "describe_run", "plot_run", "sparkline")

MATPLOTLIB = Requirement("matplotlib")

_BAR_CHARACTERS = "▁▂▃▄▅▆▇█"
_MISSING_CHARACTER = " "
_IMAGE_SUFFIXES = (".png", ".svg", ".pdf")
_PLOT_COLUMNS = 3


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Values as a line of bars from the least to the greatest, averaged in groups if there are more than `width`.

    A group without a finite value becomes a space.

    Example:
        >>> sparkline([0, 1, 2, 3])
        '▁▃▆█'
    """
    groups = min(width, len(values))
    edges = [round(i * len(values) / groups) for i in range(groups + 1)] if groups else [0]
    means = [_mean([v for v in values[a:b] if math.isfinite(v)]) for a, b in itertools.pairwise(edges)]
    present = [mean for mean in means if mean is not None]
    low, high = (min(present), max(present)) if present else (0.0, 0.0)
    return "".join(_MISSING_CHARACTER if mean is None else _BAR_CHARACTERS[_height(mean, low, high)] for mean in means)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(v / len(values) for v in values) if values else None


def _height(value: float, low: float, high: float) -> int:
    # Halves first, because the difference of two large numbers may overflow.
    span = high / 2 - low / 2
    return round((value / 2 - low / 2) / span * (len(_BAR_CHARACTERS) - 1)) if span > 0 else 0


def describe_run(run: RunRecord, width: int = 40) -> str:
    """The run as text: name, start, duration, hyperparameters, and each curve with its range and last value."""
    curves = run.curves()
    lines = [
        f"{run.name}  ({run.path})",
        f"started {datetime.fromtimestamp(run.started):%Y-%m-%d %H:%M:%S}, {_state(run)}",
    ]
    lines += [f"  {name}: {value}" for name, value in run.config.items()]
    name_width = max(map(len, curves), default=0)
    for name, points in curves.items():
        values = [value for _, value in points]
        finite = [value for value in values if math.isfinite(value)]
        extent = f"{min(finite):.4g} .. {max(finite):.4g}" if finite else "no finite value"
        lines.append(
            f"{name:<{name_width}}  {sparkline(values, width)}  last {values[-1]:.4g}, {extent}, {len(values)} points"
        )
    return "\n".join(lines if curves else [*lines, "no curves: the run logged no numbers"])


def _state(run: RunRecord) -> str:
    damaged = f", {run.damaged} damaged lines skipped" if run.damaged else ""
    if not run.records:
        return ("finished" if run.finished else "not finished") + damaged
    seconds = run.records[-1].time - run.started
    return f"{'finished' if run.finished else 'not finished'} after {seconds:.1f} s{damaged}"


def plot_run(run: RunRecord, path: Path) -> None:
    """Draw each curve in its own chart; the suffix of `path` selects the format: .png, .svg, .pdf or .html.

    Raises:
        Missing: matplotlib is not installed.
        SettingError: another suffix, a run without numbers, or a path that cannot be written.
    """
    failure = f"Cannot draw the curves of the run {run.name!r} in {str(path)!r}."
    MATPLOTLIB.demand(failure)
    suffix = path.suffix.lower()
    if suffix not in (*_IMAGE_SUFFIXES, ".html"):
        raise SettingError(
            failure, f"The format {suffix!r} is unknown.", f"Use one of {', '.join(_IMAGE_SUFFIXES)}, .html."
        )
    if not run.curves():
        raise SettingError(failure, "The run has no numbers.", "Log some: tracker.log({'loss': ...}, step=...).")
    image = io.BytesIO()
    _figure(run).savefig(image, format="png" if suffix == ".html" else suffix[1:], dpi=120)
    try:
        path.write_bytes(_page(run, image.getvalue()) if suffix == ".html" else image.getvalue())
    except OSError as error:
        raise SettingError(failure, f"The system cannot write it: {error}.", "Choose another --output.") from error


def _figure(run: RunRecord) -> Any:
    """A grid of charts; without pyplot, which has global state and may open a window."""
    from matplotlib.figure import Figure

    curves = run.curves()
    columns = min(_PLOT_COLUMNS, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(4.5 * columns, 3 * rows), layout="constrained")
    for number, (name, points) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(rows, columns, number)
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, marker="." if len(points) < 50 else None)
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.suptitle(run.name)
    return figure


def _page(run: RunRecord, image: bytes) -> bytes:
    rows = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in run.config.items()
    )
    encoded = base64.b64encode(image).decode()
    name = html.escape(run.name)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{name}</title><h1>{name}</h1><table>{rows}</table>"
        f'<img alt="curves of {name}" src="data:image/png;base64,{encoded}"></html>\n'
    ).encode()
