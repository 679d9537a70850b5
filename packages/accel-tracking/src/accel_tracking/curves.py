"""Curves of a run drawn as text: one line per metric, with a sparkline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from datetime import datetime

from accel_tracking.run_file import RunRecord

__all__ = ("describe_run", "sparkline")

_BARS = "▁▂▃▄▅▆▇█"
_GAP = " "


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Values as a line of bars from the least to the greatest; more values than `width` are averaged in groups.

    A group without a finite value is a gap.

    Example:
        >>> sparkline([0, 1, 2, 3])
        '▁▃▆█'
    """
    groups = min(width, len(values))
    edges = [round(i * len(values) / groups) for i in range(groups + 1)] if groups else [0]
    means = [_mean([v for v in values[a:b] if math.isfinite(v)]) for a, b in itertools.pairwise(edges)]
    known = [mean for mean in means if mean is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    return "".join(_GAP if mean is None else _BARS[_height(mean, low, high)] for mean in means)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(v / len(values) for v in values) if values else None


def _height(value: float, low: float, high: float) -> int:
    # Halves first: the difference of two large numbers may be infinite.
    span = high / 2 - low / 2
    return round((value / 2 - low / 2) / span * (len(_BARS) - 1)) if span > 0 else 0


def describe_run(run: RunRecord, width: int = 40) -> str:
    """The run in lines of text: name, start, length, hyperparameters, and each curve with its range and last value."""
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
    return "\n".join(lines if curves else [*lines, "no numbers were logged"])


def _state(run: RunRecord) -> str:
    damaged = f", {run.damaged} damaged lines skipped" if run.damaged else ""
    if not run.records:
        return ("finished" if run.finished else "not finished") + damaged
    seconds = run.records[-1].time - run.started
    return f"{'finished' if run.finished else 'not finished'} after {seconds:.1f} s{damaged}"
