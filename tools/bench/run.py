"""Run the benches beside this file and write what they measured to docs/benchmarks.md.

    python tools/bench/run.py --peer PYTHON [name ...]

`PYTHON` is an interpreter that has the original library. Each bench runs in a process of its own and prints one JSON
line for each case; a bench that was not named keeps its table from the last run.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCUMENT = HERE.parent.parent / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Written by `nox -s bench`. Ours beside the original library and, where there is one, the raw limit; medians of
alternating runs in one session, CPU seconds unless the unit says otherwise. Ratios hold between machines; seconds do
not.
"""


def benches() -> list[str]:
    """Names of all benches."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem != "run" and not path.stem.startswith("_"))


def measure(name: str, peer: str) -> list[dict[str, Any]]:
    """The cases of one bench.

    Raises:
        SystemExit: it failed; what it printed was shown.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, str(HERE / f"{name}.py"), "--peer", peer],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"The bench {name!r} failed with exit code {done.returncode}.\n{done.stdout}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def value(case: dict[str, Any]) -> float | None:
    """The figure that the limit of a case applies to."""
    ours, peer, raw = (case.get(key) for key in ("ours", "peer", "raw"))
    if case["figure"] == "ours/peer":
        return None if peer is None else ours / peer
    if case["figure"] == "ours/raw":
        return None if raw is None else ours / raw
    return None if raw is None else ours - raw


def row(case: dict[str, Any]) -> str:
    """One line of the table."""
    figure, limit = value(case), case.get("limit")
    verdict = "" if limit is None or figure is None else ("yes" if figure <= limit else "**no**")
    numbers = (case.get("ours"), case.get("peer"), case.get("raw"), figure, limit)
    shown = ("" if number is None else f"{number:.3g}" for number in numbers)
    ours, peer, raw, measured, allowed = shown
    figure_shown = f"{case['figure']} = {measured}"
    return f"| {case['case']} | {case['unit']} | {ours} | {peer} | {raw} | {figure_shown} | {allowed} | {verdict} |"


def section(name: str, cases: list[dict[str, Any]]) -> str:
    """The part of the document about one bench."""
    method = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or ""
    lines = [
        f"## {name}",
        "",
        method,
        "",
        f"Measured on: {machine()}.",
        "",
        "| case | unit | ours | original | raw | figure | at most | kept |",
        "|---|---|---|---|---|---|---|---|",
        *map(row, cases),
    ]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """What the figures were measured on."""
    versions = f"Python {platform.python_version()}, torch {metadata.version('torch')}"
    return f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, {versions}"


def former_sections() -> dict[str, str]:
    """The tables of the last run by name of bench."""
    if not DOCUMENT.exists():
        return {}
    parts = re.split(r"^(?=## )", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].removeprefix("## "): part.rstrip() + "\n" for part in parts}


def main() -> None:
    """Run what was named, or everything."""
    parser = argparse.ArgumentParser(description="Measure ours against the original library.")
    parser.add_argument("--peer", required=True, help="interpreter that has the original library")
    parser.add_argument("names", nargs="*", help=f"benches to run: {', '.join(benches())}")
    options = parser.parse_args()
    sections = former_sections()
    for name in options.names or benches():
        print(f"bench {name} ...", flush=True)
        cases = measure(name, options.peer)
        sections[name] = section(name, cases)
        print("\n".join(map(row, cases)), flush=True)
    known = [sections[name] for name in sorted(sections)]
    DOCUMENT.write_text("\n".join([HEAD, *known]), encoding="utf-8")


if __name__ == "__main__":
    main()
