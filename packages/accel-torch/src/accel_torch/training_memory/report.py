"""Estimates of plans as a table with bars, as a picture, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from accel_bigmodel.sizes import convert_bytes
from accel_cli.config.write import config_text, nested
from accel_cli.terminal import columns, in_colour
from accel_torch.training_memory.comparison import ModelFacts, PlanComparison, PlanEstimate
from accel_torch.training_memory.live_bytes import MemoryKind
from accel_torch.training_memory.plans import config_values, launch_command, needs_in_script

__all__ = ("as_json", "as_text", "draw_svg")

_COLOURS: Final = {
    MemoryKind.PARAMETERS: ("#", "#4269d0"),
    MemoryKind.GRADIENTS: ("+", "#efb118"),
    MemoryKind.OPTIMIZER: ("o", "#ff725c"),
    MemoryKind.ACTIVATIONS: ("=", "#6cc5b0"),
    MemoryKind.GATHERED: ("g", "#a463f2"),
    MemoryKind.COMMUNICATION: ("~", "#9c6b4e"),
}
"""The letter and colour of each kind."""
_WIDTH: Final = 50


def as_text(found: PlanComparison, script: str) -> str:
    """The plans as a table, a bar for each, and how to launch a script under those that fit."""
    facts, estimates, limit = found.facts, found.estimates, found.limit
    head = ["plan", "micro-batch", "accumulation", "peak of a rank", "host", "cost of a step", "fits"]
    rows = [
        [
            one.plan.name,
            one.plan.micro_batch,
            one.plan.accumulation,
            convert_bytes(one.memory.peak),
            convert_bytes(one.memory.host + one.memory.staging),
            f"{one.seconds:.2e} s",
            "yes" if one.fits else f"no: {convert_bytes(one.missing)} missing",
        ]
        for one in estimates
    ]
    lines = [*columns(head, rows, status="fits"), "", *_bars(estimates, limit), ""]
    lines.append("host: offloaded tensors, and the copy that an asynchronous checkpoint makes.")
    lines += [f"{plan.name} does not apply: {reason}" for plan, reason in found.refused]
    fitting = [one for one in estimates if one.fits]
    for number, one in enumerate(fitting, 1):
        lines += ["", f"{number}. {one.plan.name}", f"   {launch_command(one.plan, facts.blocks, script)}"]
        lines += [f"   {line}" for line in config_text(config_values(one.plan, facts.blocks)).splitlines()]
        if needs_in_script(one.plan):
            lines.append(f"   In the script: {needs_in_script(one.plan)}")
    if not fitting:
        nearest = estimates[0]
        lines += [
            "",
            f"No plan fits into {convert_bytes(limit or 0)}. The nearest is {nearest.plan.name} with a micro-batch of "
            f"{nearest.plan.micro_batch}: {convert_bytes(nearest.missing)} are missing on each device.",
        ]
    return "\n".join(lines)


def _bars(estimates: Sequence[PlanEstimate], limit: int | None) -> list[str]:
    """One bar for each plan; with colours if the terminal supports them, otherwise with a letter for each kind."""
    most = _scale(estimates, limit)
    width = max(len(one.plan.name) for one in estimates)
    mark = round(_WIDTH * limit / most) if limit and limit <= most else None
    lines = []
    for one in estimates:
        cells = {kind: round(_WIDTH * _on_device(one, kind) / most) for kind in MemoryKind}
        bar = "".join(in_colour(_COLOURS[kind][0] * count, _COLOURS[kind][1]) for kind, count in cells.items())
        used = sum(cells.values())
        end = " " * (mark - used) + "|" if mark is not None and mark >= used else ""
        lines.append(f"{one.plan.name:<{width}}  {bar}{end}")
    legend = ", ".join(f"{in_colour(letter, colour)} {kind.value}" for kind, (letter, colour) in _COLOURS.items())
    return [*lines, f"{legend}{', | memory of a device' if mark is not None else ''}"]


def _scale(estimates: Sequence[PlanEstimate], limit: int | None) -> int:
    """Bytes of the longest bar: the memory of a device, unless all bars would be short."""
    most = max(1, *(one.memory.peak for one in estimates))
    return limit if limit and most < limit <= 3 * most else most


def _on_device(estimate: PlanEstimate, kind: MemoryKind) -> int:
    return 0 if kind.value in estimate.memory.on_host else estimate.memory.parts[kind.value]


def as_json(found: PlanComparison, script: str) -> str:
    """The comparison as one line of JSON; sizes are bytes."""
    return json.dumps(
        {
            "memory": found.limit,
            "operations_per_sample": found.facts.operations,
            "plans": [_row(found.facts, one, script) for one in found.estimates],
            "refused": {plan.name: reason for plan, reason in found.refused},
        }
    )


def _row(facts: ModelFacts, one: PlanEstimate, script: str) -> dict[str, Any]:
    return {
        "name": one.plan.name,
        "backend": one.plan.backend,
        "processes": one.plan.processes,
        "tp": one.plan.tp,
        "variant": one.plan.variant,
        "recompute": one.plan.recompute,
        "micro_batch": one.plan.micro_batch,
        "accumulation": one.plan.accumulation,
        "fits": one.fits,
        "missing": one.missing,
        "rank": one.memory.rank,
        "peak": one.memory.peak,
        "parts": {**one.memory.parts, "checkpoint staging": one.memory.staging},
        "host": one.memory.host,
        "seconds": one.seconds,
        "launch": launch_command(one.plan, facts.blocks, script),
        "config": nested(config_values(one.plan, facts.blocks)),
        "in_script": needs_in_script(one.plan),
    }


def draw_svg(path: str, found: PlanComparison) -> None:
    """Write the bars to an SVG file, with the memory of a device as a line.

    Raises:
        OSError: the file cannot be written.
    """
    left, width, row = 240, 640, 28
    estimates, limit = found.estimates, found.limit
    most = _scale(estimates, limit)
    height = row * (len(estimates) + 2) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 120}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, one in enumerate(estimates):
        top, start = 8 + number * row, float(left)
        parts.append(f'<text x="{left - 8}" y="{top + 15}" text-anchor="end">{escape(one.plan.name)}</text>')
        for kind in MemoryKind:
            size = _on_device(one, kind)
            length = width * size / most
            parts.append(
                f'<rect x="{start:.1f}" y="{top}" width="{length:.1f}" height="20" fill="{_COLOURS[kind][1]}">'
                f"<title>{kind.value}: {convert_bytes(size)}</title></rect>"
            )
            start += length
        parts.append(f'<text x="{start + 6:.1f}" y="{top + 15}">{convert_bytes(one.memory.peak)}</text>')
    end = 8 + len(estimates) * row
    if limit and limit <= most:
        at = left + width * limit / most
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{end}" stroke="black" stroke-dasharray="4"/>')
    for number, kind in enumerate(MemoryKind):
        x, y = left + (number % 3) * 210, end + 10 + (number // 3) * 20
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_COLOURS[kind][1]}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 11}">{kind.value}</text>')
    Path(path).write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")
