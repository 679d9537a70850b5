"""Curves of a run as a picture, drawn by matplotlib: PNG, SVG or PDF, or one HTML page that needs no other file."""

from __future__ import annotations

import base64
import html
import io
import math
from pathlib import Path
from typing import Any

from accel_state.errors import SettingError
from accel_state.settings.installed import Requirement
from accel_tracking.run_file import RunRecord

__all__ = ("MATPLOTLIB", "plot_run")

MATPLOTLIB = Requirement("matplotlib", extra="accel-tracking[plots]")

_PICTURES = (".png", ".svg", ".pdf")
_COLUMNS = 3


def plot_run(run: RunRecord, path: Path) -> None:
    """Draw each curve in a chart of its own; the suffix of `path` says how: .png, .svg, .pdf or .html.

    Raises:
        Missing: matplotlib is not installed.
        SettingError: another suffix, nothing to draw, or the file cannot be written.
    """
    asked = f"Draw the curves of the run {run.name!r} in {str(path)!r}."
    MATPLOTLIB.demand(asked)
    suffix = path.suffix.lower()
    if suffix not in (*_PICTURES, ".html"):
        raise SettingError(
            asked, f"The suffix {suffix!r} is none of: {', '.join(_PICTURES)}, .html.", "Use one of these."
        )
    if not run.curves():
        raise SettingError(asked, "The run has no numbers.", "Log some: tracker.log({'loss': ...}, step=...).")
    picture = io.BytesIO()
    _figure(run).savefig(picture, format="png" if suffix == ".html" else suffix[1:], dpi=120)
    try:
        path.write_bytes(_page(run, picture.getvalue()) if suffix == ".html" else picture.getvalue())
    except OSError as error:
        raise SettingError(asked, f"It cannot be written: {error}.", "Name another place with --output.") from error


def _figure(run: RunRecord) -> Any:
    """A grid of charts; made without pyplot, so that no window and no global state is involved."""
    from matplotlib.figure import Figure

    curves = run.curves()
    columns = min(_COLUMNS, len(curves))
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


def _page(run: RunRecord, picture: bytes) -> bytes:
    rows = "".join(
        f"<tr><th>{html.escape(str(name))}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in run.config.items()
    )
    image = base64.b64encode(picture).decode()
    name = html.escape(run.name)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{name}</title><h1>{name}</h1><table>{rows}</table>"
        f'<img alt="curves of {name}" src="data:image/png;base64,{image}"></html>\n'
    ).encode()
