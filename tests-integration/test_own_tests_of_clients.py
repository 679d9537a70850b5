"""The program that runs a client library's own tests fails when tests are lost, not only when they fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel_testing.processes import run_command

PROGRAM = Path(__file__).parent / "clients" / "own_tests.py"
PASSES = "def test_that_passes():\n    pass\n"


@pytest.mark.parametrize(
    ("first_line", "code", "said"),
    [
        ("", 0, "2 of 2 pass with the original, 2 of 2 here"),
        ("import a_library_that_nobody_has", 1, "these files cannot be imported with the original: ['tests.test_b']"),
        ("import pytest; pytest.importorskip('a_library_that_nobody_has')", 0, "1 of 2 pass with the original"),
    ],
)
def test_a_file_that_cannot_be_imported_is_an_error(tmp_path: Path, first_line: str, code: int, said: str) -> None:
    (tmp_path / "test_a.py").write_text(PASSES, encoding="utf-8")
    (tmp_path / "test_b.py").write_text(f"{first_line}\n{PASSES}", encoding="utf-8")
    command = [sys.executable, str(PROGRAM), sys.executable, "some", "not slow", "test_*.py"]
    done = run_command(command, timeout=200, env={"ACCEL_SOME_TESTS": str(tmp_path)})
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
