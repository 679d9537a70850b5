"""Compare what the drop-in `accelerate` still lacks with the list of what it is known to lack.

    python tools/api_gaps.py            exit 1 when the list is not what is true
    python tools/api_gaps.py --write    write the list

A gap that is not on the list is something that was lost; one on the list that is closed has to be taken off it, so the
list only ever becomes shorter. What is compared: names and parameters of `tests-integration/reference/api.json`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "tests-integration" / "reference"
LIST = ROOT / "tests-integration" / "api_gaps.json"

TIERS = "core,commands"
MODULE = re.compile(r"^(accelerate[\w.]*): (\d+)/(\d+) names, (\d+)/(\d+) parameters$", re.MULTILINE)

Gaps = Mapping[str, Mapping[str, int]]


def measured() -> dict[str, dict[str, int]]:
    """For each old module that is not complete: how many names and parameters it lacks.

    Raises:
        SystemExit: the comparison could not be made.
    """
    command = [sys.executable, str(REFERENCE / "check_api.py"), "--tier", TIERS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "api parity: " not in done.stdout:
        raise SystemExit(f"api_gaps: check_api.py failed:\n{done.stdout}{done.stderr}")
    return {
        module: {"names": int(names) - int(has), "parameters": int(parameters) - int(takes)}
        for module, has, names, takes, parameters in MODULE.findall(done.stdout)
    }


def differences(known: Gaps, found: Gaps) -> Iterator[str]:
    """One line for each count that differs from the list."""
    for module in sorted({*known, *found}):
        for kind in ("names", "parameters"):
            before = known.get(module, {}).get(kind, 0)
            now = found.get(module, {}).get(kind, 0)
            if now > before:
                yield f"{module} lacks {now} {kind}, {now - before} more than are known to be missing"
            elif now < before:
                yield f"{module} lacks {now} {kind}, fewer than the {before} on the list: run tools/api_gaps.py --write"


def written(gaps: Gaps) -> str:
    """The text of the list."""
    return json.dumps(gaps, indent=1, sort_keys=True) + "\n"


def main(arguments: list[str]) -> int:
    """Compares, or writes, and returns the exit code."""
    found = measured()
    if arguments == ["--write"]:
        LIST.write_text(written(found), encoding="utf-8")
        return 0
    lines = list(differences(json.loads(LIST.read_text(encoding="utf-8")), found))
    for line in lines:
        print(f"api_gaps: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
