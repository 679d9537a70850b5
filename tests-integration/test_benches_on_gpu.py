"""The cases that need a GPU: their works run on the CPU in small sizes, and the report has what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_testing.fresh import fresh
from bench.case import Case, Scope
from bench.cases.gpu import CASES
from bench.on_gpu import write_report
from bench.results import Row

ROOT = Path(__file__).resolve().parents[1]


def works() -> list[Any]:
    """The sides of ours and of the raw operation, each once."""
    found: dict[Any, Any] = {}
    for case in CASES:
        for kind, side in case.work.sides.items():
            if kind != "peer":
                found.setdefault(side, pytest.param(kind, side, id=f"{case.name}-{kind}"))
    return list(found.values())


@pytest.mark.parametrize(("kind", "side"), works())
def test_a_work_runs_twice(kind: str, side: Any, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    with fresh():
        call = side(Scope(kind, tmp_path, kept))
        call()
        call()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.figure}")
def test_each_case_needs_a_gpu_and_is_metered_there(case: Case) -> None:
    assert case.needs == "cuda"
    assert case.meter == "GPU"


@pytest.mark.parametrize("arguments", [["--gpu"], ["--gpu", "--list"]])
def test_without_a_gpu_the_cases_are_shown_and_all_is_well(arguments: list[str], tmp_path: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(ROOT / "tools" / "measure.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    *shown, why = done.stdout.splitlines()
    assert why.endswith("finds no GPU, so nothing was measured.")
    assert len(shown) == len(CASES)
    assert not list(tmp_path.iterdir())


def test_the_report_has_rows_speeds_and_what_could_not_be_measured(tmp_path: Path) -> None:
    case = CASES[0]
    row = Row(*case.key, case.limit, 100.0, 110.0, 98.0, value=1.02, spread=0.01, turns=2, machine="a machine")
    write_report(tmp_path / "gpu.json", [row], ["python could not measure 'that'."])
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert f"| {case.name} | {case.unit} | 100 | 110 | 98 |" in page
    assert f"- {case.name}: ours 81,920, original 74,473, raw 83,592" in page
    assert "could not measure 'that'" in page
    assert len(json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]) == 1
