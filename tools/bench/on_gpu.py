"""`nox -s bench -- --gpu`: measures the cases that need a GPU, within minutes, and writes a report of its own.

It needs no installation: the sources come from the checkout, as in `tools/gpu/session.py`, and the original library and
Fabric from the interpreter of the original. Work that cannot be measured is reported, and the others continue.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Final

from bench.cases import cases
from bench.results import Row, document, machine, write_rows
from bench.turns import ROOT, Pace, Runner

SECONDS: Final = 450.0
"""After them no work begins; one may take a minute and a half."""

PACE: Final = Pace(least=2, most=3, seconds=30.0)
"""Each turn costs the start of two interpreters, and figures of a GPU are steady."""

ASK: Final = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


def measure_all(peer: str, only_list: bool, path: Path) -> int:
    """Measure the cases that need a GPU.

    Args:
        peer: an interpreter that has the original library and Fabric.
        only_list: show the cases and measure nothing.
        path: for the rows as JSON; the page has the same name with the suffix ".md".

    Returns:
        The exit code: 0 also where there is no GPU.
    """
    rows = [case for case in cases() if case.needs == "cuda"]
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False)
    device = asked.stdout.strip()
    if only_list or not device:
        print("\n".join(f"{row.name}: {row.unit}, {row.figure}, {row.limit or 'no limit'}" for row in rows))
        if not device:
            print(f"The torch of {sys.executable} finds no GPU, so nothing was measured.")
        return 0
    sys.path.insert(0, str(ROOT / "tools" / "gpu"))
    from checkout import write_metadata  # type: ignore[import-not-found, unused-ignore]

    begun, found, notes = time.monotonic(), list[Row](), list[str]()
    with tempfile.TemporaryDirectory(prefix="bench-sources-") as folder:
        os.environ["BENCH_SOURCES"] = os.pathsep.join(write_metadata(Path(folder)))
        runner = Runner(cases(), peer, PACE, f"{device}, {machine()}")
        for measured, failures in runner.measure(rows, partial(print, flush=True), SECONDS):
            found += measured
            notes += failures
            # The machine may be taken away at any time.
            write_report(path, found, notes)
    print(f"{len(found)} rows in {time.monotonic() - begun:.0f} s: {path.with_suffix('.md')}")
    return 1 if notes else 0


def write_report(path: Path, found: Sequence[Row], notes: Sequence[str]) -> None:
    """The rows as JSON, and a page with their tables, the tokens per second, and what could not be measured."""
    write_rows(path, found)
    head, section, tables = document(cases(), found).partition("## ")
    when = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, by `nox -s bench -- --gpu`."
    speeds = [f"- {row.case}: {_tokens(row)}" for row in found if "tokens" in row.unit]
    lines = [head.partition("\n")[0], "", when, "", section + tables, "## Tokens per second", "", *speeds, ""]
    lines += [f"```text\n{note}\n```\n" for note in notes]
    path.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")


def _tokens(row: Row) -> str:
    """What each side does in a second, of a row whose unit is milliseconds for 8,192 tokens."""
    sides = {"ours": row.ours, "original": row.peer, "raw": row.raw}
    return ", ".join(f"{name} {8192 / value * 1e3:,.0f}" for name, value in sides.items() if value)
