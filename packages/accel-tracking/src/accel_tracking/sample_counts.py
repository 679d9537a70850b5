"""`accel runs samples`: the samples that a run read from each source of a mixture, from the run's JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from accel_state.errors import SettingError
from accel_tracking.trackers.jsonl import RunRecord, read_run

__all__ = ("COLUMNS", "TABLE", "describe_samples")

TABLE: Final = "samples by source"
"""Name of the table that an Accelerator logs to the tracker "jsonl" beside the metrics."""

COLUMNS: Final = ("loader", "source", "samples", "epochs", "asked", "given")
"""Number of the loader, name of the source, samples it gave, how often it was read through, and its shares."""


def describe_samples(path: str, as_json: bool) -> str:
    """Print the number of samples from each source up to the last log of a run.

    Args:
        path: the .jsonl file of the run, or a folder.
        as_json: print one line of JSON instead of a table.

    Raises:
        SettingError: there is no run, or it read no mixture.
    """
    run = read_run(path)
    step, rows = _newest(run)
    if as_json:
        sources = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        return json.dumps({"run": run.name, "step": step, "sources": sources})
    return "\n".join([run.name if step is None else f"{run.name}, step {step}", *_lines(rows)])


def _newest(run: RunRecord) -> tuple[float | None, list[list[Any]]]:
    """The step and the rows of the last table that can be read."""
    for record in reversed(run.records):
        table = record.table or {}
        rows = table.get("rows")
        if table.get("name") != TABLE or not isinstance(rows, list) or table.get("columns") != list(COLUMNS):
            continue
        if all(isinstance(row, list) and len(row) == len(COLUMNS) for row in rows):
            return record.step, rows
    raise SettingError(
        f"Cannot show the samples by source of the run {run.name!r}.",
        f"Its file {str(run.path)!r} contains no table of samples by source.",
        "Read a MixtureDataset through a prepared loader, and call accelerator.log().",
    )


def _lines(rows: Iterable[Sequence[Any]]) -> list[str]:
    """The rows as text in columns; numbers are right-aligned."""
    cells = [COLUMNS, *([_text(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if name == "source" else cell.rjust(width)
            for name, cell, width in zip(COLUMNS, row, widths, strict=True)
        )
        for row in cells
    ]


def _text(cell: Any) -> str:
    return f"{cell:.4f}" if isinstance(cell, float) else str(cell)
