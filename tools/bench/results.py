"""Rows that were measured: the file that machines read, and the tables for people."""

from __future__ import annotations

import json
import os
import platform
import statistics
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from bench.case import Case

HEAD: Final = """# Benchmarks

`nox -s bench` writes this page. It compares accel with the original library and, where there is one, with a raw
operation; "raw" is explained above each table. Values are medians of alternating runs. Ratios are comparable between
machines, seconds are not. "±" is half the distance between the quartiles of the runs.
[How it is measured](../explanation/how-benchmarks-are-made.md).
"""

SHOWN: Final[Mapping[str, str]] = {
    "ours": "accel",
    "ours/peer": "accel / original",
    "ours/raw": "accel / raw",
    "ours - raw": "accel - raw",
    "(ours - raw)/(peer - raw)": "(accel - raw) / (original - raw)",
}
"""How the page writes each figure."""


@dataclass(frozen=True)
class Row:
    """A row of the table with what was measured.

    Args:
        group: the table it belongs to.
        case: what is done.
        unit: of the three values.
        figure: how the sides are compared.
        limit: the most that the figure may be.
        ours: median of the turns; so are `peer` and `raw`, None where there is none.
        value: the figure of the medians.
        spread: half the distance between the quartiles of the turns' figures.
        turns: how many there were.
        machine: what it was measured on.
    """

    group: str
    case: str
    unit: str
    figure: str
    limit: float | None
    ours: float | None
    peer: float | None
    raw: float | None
    value: float
    spread: float
    turns: int
    machine: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells this row from all others; that of its case."""
        return self.group, self.case, self.unit, self.figure


def half_quartiles(values: Sequence[float]) -> float:
    """Half the distance between the quartiles; zero for a single value."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / 2


def machine() -> str:
    """What is measured on."""
    versions = f"Python {platform.python_version()}, torch {metadata.version('torch')}"
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, {versions}"


def read_rows(path: Path) -> list[Row]:
    """The rows in a file; none where there is no file."""
    if not path.exists():
        return []
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows, one a line, with four digits."""
    lines = [json.dumps({name: _rounded(value) for name, value in asdict(row).items()}) for row in rows]
    path.write_text('{"rows": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def merged(table: Sequence[Case], former: Iterable[Row], measured: Iterable[Row]) -> list[Row]:
    """In the order of the table: what was measured now, and else before; what left the table is dropped."""
    known = {row.key: row for rows in (former, measured) for row in rows}
    return [known[case.key] for case in table if case.key in known]


def shown(number: float | None) -> str:
    """A number with three digits, or to the integer from 1,000 on."""
    if number is None:
        return ""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def line(row: Row) -> str:
    """A row of the table."""
    met = "" if row.limit is None else "yes" if row.value <= row.limit else "**no**"
    numbers = (row.ours, row.peer, row.raw, row.value, row.spread, row.limit)
    ours, peer, raw, value, spread, limit = map(shown, numbers)
    figure = f"{SHOWN[row.figure]} = {value}{f' ± {spread}' if row.turns > 1 else ''}"
    return f"| {row.case} | {row.unit} | {ours} | {peer} | {raw} | {figure} | {limit} | {met} |"


def paragraphs(methods: Collection[str]) -> list[str]:
    """How the rows of a group are measured: a paragraph, or a list where there are several ways."""
    if len(methods) == 1:
        return [textwrap.fill(method, 120, break_on_hyphens=False) for method in methods]
    bullet = textwrap.TextWrapper(120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    return [bullet.fill(method) for method in methods]


def document(table: Sequence[Case], rows: Sequence[Row]) -> str:
    """The page with a table for each group."""
    cases = {case.key: case for case in table}
    sections = []
    for group, found in groupby(rows, key=lambda row: row.group):
        of_group = list(found)
        methods = dict.fromkeys(cases[row.key].method for row in of_group)
        machines = dict.fromkeys(row.machine for row in of_group)
        sections.append(
            "\n".join(
                [
                    f"## {group.replace('_', ' ').capitalize()}",
                    "",
                    *paragraphs(methods),
                    "",
                    f"Measured on: {'; '.join(machines)}.",
                    "",
                    "| case | unit | accel | original | raw | figure | limit | met |",
                    "|---|---|---|---|---|---|---|---|",
                    *map(line, of_group),
                    "",
                ]
            )
        )
    return "\n".join([HEAD, *sections])
