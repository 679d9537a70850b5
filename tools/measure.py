"""Measure the cases of bench/, and write docs/reports/benchmarks.json and benchmarks.md there.

    python tools/measure.py --peer PYTHON [group or 'pattern of a name' ...] [--compare OLD.json]

`PYTHON` is an interpreter that has the original library. Rows that were not selected stay unchanged. With
`--compare` the exit code is 1 when a row got slower beyond noise.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench import on_gpu
from bench.case import Case
from bench.cases import cases, groups, selected
from bench.comparison import compared, report
from bench.results import document, machine, merged, read_rows, write_rows
from bench.turns import ROOT, Pace, Runner

DOCUMENTS = ROOT / "docs" / "reports"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description="Measure ours against the original library.")
    parser.add_argument("--peer", default=sys.executable, help="interpreter that has the original library")
    parser.add_argument("--gpu", action="store_true", help="measure what needs a GPU, and write gpu-benchmarks.md")
    parser.add_argument("--list", action="store_true", help="show what would be measured, and measure nothing")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="print what changed since an earlier run")
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="write the rows there, and leave docs/ as it is")
    parser.add_argument("--turns", type=int, default=Pace.least, help="turns of interpreters at least")
    parser.add_argument("--most-turns", type=int, default=Pace.most, help="turns at most")
    parser.add_argument("--seconds", type=float, default=Pace.seconds, help="for further turns of unsteady works")
    parser.add_argument("patterns", nargs="*", help=f"groups, or names with * and ?; groups: {', '.join(groups())}")
    options = parser.parse_args(given)
    try:
        options.rows = selected(options.patterns)
    except LookupError as nothing:
        parser.error(str(nothing))
    if options.compare and not options.compare.is_file():
        parser.error(f"there is no file {options.compare} to compare with")
    return options


def can_run(row: Case) -> bool:
    """Whether this machine has what a case needs."""
    if row.needs == "fabric":
        return "BENCH_FABRIC" in os.environ
    code = f"import torch; raise SystemExit(not torch.{row.needs}.is_available())"
    return not row.needs or subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def main(given: Sequence[str] | None = None) -> int:
    """Measure what was selected."""
    options = arguments(given)
    if options.gpu:
        return on_gpu.measure_all(options.peer, options.list, options.json or Path("gpu-benchmarks.json"))
    if options.list:
        print("\n".join(f"{row.group}: {row.name} ({row.unit}, {row.figure})" for row in selected(options.patterns)))
        return 0
    table = cases()
    old = read_rows(options.compare) if options.compare else []
    rows = [row for row in options.rows if can_run(row)]
    pace = Pace(options.turns, max(options.turns, options.most_turns), options.seconds)
    begun = time.monotonic()
    runner = Runner(table, options.peer, pace, machine())
    sessions = list(runner.measure(rows, partial(print, flush=True)))
    found = [row for measured, _ in sessions for row in measured]
    failed = any(failures for _, failures in sessions)
    print(f"{len(found)} rows in {time.monotonic() - begun:.0f} s", flush=True)
    if options.json:
        write_rows(options.json, found)
    else:
        known = merged(table, read_rows(DOCUMENTS / "benchmarks.json"), found)
        write_rows(DOCUMENTS / "benchmarks.json", known)
        # From what was written, whose figures are rounded: the document is the same whoever makes it.
        rounded = read_rows(DOCUMENTS / "benchmarks.json")
        (DOCUMENTS / "benchmarks.md").write_text(document(table, rounded), encoding="utf-8")
    slower = False
    if options.compare:
        left_out = {case.key for case in table} - {case.key for case in rows}
        changes = compared([row for row in old if row.key not in left_out], found)
        print(report(changes))
        slower = any(change.verdict == "slower" for change in changes)
    return 1 if failed or slower else 0


if __name__ == "__main__":
    sys.exit(main())
