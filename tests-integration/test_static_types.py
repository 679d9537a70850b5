"""mypy and pyright both see what `prepare` gives back, and both see mistakes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STATIC = ROOT / "tests-integration" / "static"

MISTAKES = [12, 13, 14, 15]
"""Lines of `wrong.py`."""

pytestmark = [pytest.mark.slow]


def mypy(file: str) -> list[int]:
    """The lines in which mypy finds errors."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(STATIC / file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^(.+?):(\d+): error:", done.stdout, re.MULTILINE)
    return sorted({int(line) for path, line in found if path.endswith(file)})


def pyright(file: str) -> list[int]:
    """The lines in which pyright finds errors."""
    program = Path(sys.executable).with_name("pyright")
    version = subprocess.run([program, "--version"], capture_output=True, check=False, timeout=300)
    if version.returncode:
        pytest.skip("pyright does not start on this machine (it needs Node.js)")
    command = [str(program), "--outputjson", str(STATIC / file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == 1
    errors = [one for one in found["generalDiagnostics"] if one["severity"] != "information"]
    return sorted({one["range"]["start"]["line"] + 1 for one in errors if one["file"].endswith(file)})


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_types_come_back_from_prepare(checker: object) -> None:
    assert checker("prepared.py") == []  # type: ignore[operator]


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_mistakes_are_found(checker: object) -> None:
    assert checker("wrong.py") == MISTAKES  # type: ignore[operator]
