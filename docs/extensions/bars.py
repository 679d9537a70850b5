"""The directive `bars`: ratios of the benchmarks as bars in HTML, as wide as the page and in its colours."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROWS = Path(__file__).parents[1] / "reports" / "benchmarks.json"

SIDES = {
    "ours/peer": "of the original",
    "(ours - raw)/(peer - raw)": "of what the original adds",
    "ours/raw": "of the raw operation",
}
"""Figures that are ratios, and what each is a ratio to."""


def bar(row: dict[str, Any], scale: float) -> str:
    """One row: its name, a bar with a mark at 1, and the ratio."""
    value = row["value"]
    kind = "slower" if value > 1 else "faster"
    said = f"{value:.3g} {SIDES[row['figure']]}"
    return (
        f'<div class="bar"><span class="bar-name">{escape(row["case"])}</span>'
        f'<span class="bar-track" style="--one: {100 / scale:.1f}%">'
        f'<span class="bar-fill {kind}" style="width: {min(100.0, 100 * value / scale):.1f}%"></span></span>'
        f'<span class="bar-value">{said}</span></div>'
    )


def chart(rows: Iterable[dict[str, Any]]) -> str:
    """Rows whose figure is a ratio, as bars from 0; those of memory and counts are in the table alone."""
    shown = [row for row in rows if row["figure"] in SIDES]
    scale = max([1.25, *(min(row["value"], 2.0) for row in shown)])
    return f'<div class="bars">{"".join(bar(row, scale) for row in shown)}</div>' if shown else ""


class Bars(SphinxDirective):
    """`{bars} GROUP` shows a group of rows; with content, the cases of its lines, each as `NAME = CASE`."""

    optional_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        """A raw node of HTML.

        Raises:
            DirectiveError: a line names no case.
        """
        self.env.note_dependency(str(ROWS))
        rows = json.loads(ROWS.read_text(encoding="utf-8"))["rows"]
        if self.arguments:
            chosen = [row for row in rows if row["group"] == self.arguments[0]]
        else:
            by_case = {row["case"]: row for row in reversed(rows) if row["figure"] in SIDES}
            chosen = []
            for line in self.content:
                name, _, case = line.partition(" = ")
                if case not in by_case:
                    raise self.error(f"benchmarks.json has no ratio of the case {case!r}")
                chosen.append({**by_case[case], "case": name})
        return [nodes.raw("", chart(chosen), format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive."""
    app.add_directive("bars", Bars)
    return {"parallel_read_safe": True}
