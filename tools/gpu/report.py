"""The report of a GPU session: a page for people, and the same as JSON beside it."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

__all__ = ("write_report",)


def write_report(path: Path, facts: dict[str, Any], session: Any, seconds: float) -> None:
    """Write what is known so far.

    Args:
        path: of the page; the JSON has the same name with another suffix.
        facts: of the machine and its Python.
        session: has `options`, `tests`, `results` and `troubles`.
        seconds: since the session began.
    """
    rows = [{**test, **session.results.get(test["test"], {"outcome": "not run"})} for test in session.tests]
    head = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": session.options.device,
        "processes": session.options.nproc,
        "seconds": round(seconds, 1),
        **facts,
        "outcomes": dict(Counter(row["outcome"] for row in rows)),
    }
    path.with_suffix(".json").write_text(
        json.dumps({"head": head, "tests": rows, "troubles": session.troubles}, indent=1), encoding="utf-8"
    )
    lines = ["# GPU session", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_shown(value)} |" for name, value in head.items()]
    lines += ["", _about_processes(session.options), "", *_failures(rows, session.troubles), *_table(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _about_processes(options: Any) -> str:
    if options.device != "cuda":
        return f"No GPU took part: the tests ran on the device {options.device!r}, to try the session itself."
    if options.nproc == 1:
        return "One process took part: what NCCL's calls and streams do is shown, communication between GPUs is not."
    return f"{options.nproc} processes took part, each on a GPU of its own."


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in sorted(value.items())) or "none"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _failures(rows: list[dict[str, Any]], troubles: list[dict[str, Any]]) -> list[str]:
    """What went wrong, with its text."""
    quiet = {"passed", "skipped", "not run", "expected failure"}
    lines = []
    for row in [*troubles, *(row for row in rows if row["outcome"] not in quiet)]:
        lines += [f"## {row.get('outcome', 'trouble')}: {row['test']}", "", "```text", row.get("text", ""), "```", ""]
    return lines


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["## Each test", "", "| test | outcome | seconds | what differs on a GPU |", "|---|---|---|---|"]
    for row in rows:
        name = row["test"].replace("|", "/")
        reason = f": {row['text']}" if row["outcome"] == "skipped" else ""
        outcome = f"{row['outcome']}{reason}".replace("|", "/").replace("\n", " ")
        lines.append(f"| {name} | {outcome} | {row.get('seconds', '')} | {row['differs']} |")
    return lines
