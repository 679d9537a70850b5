"""`accel check-parity` on the catalogue of planted faults of parallel training.

The catalogue was written by an author who had not seen the check.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from catalogues.parallelism_bugs import CATALOGUE, PLANS

import accel_check.started
from accel_testing.processes import run_command

pytestmark = [pytest.mark.usefixtures("preloaded_python")]
PRELOADED = ("accel_torch.accelerator", "accel_check.comparison")

QUICK = ("ddp_averaged_twice", "tp_missing_all_reduce")
"""Entries that every run of the tests checks."""

SCRIPT = """
import os, sys
from contextlib import nullcontext

sys.path.insert(0, {folder!r})
from catalogues.parallelism_bugs import CATALOGUE, train

several = int(os.environ.get("WORLD_SIZE", "1")) > 1
with CATALOGUE[sys.argv[1]].planted() if several and sys.argv[1] in CATALOGUE else nullcontext():
    train(sys.argv[2], dropout=float(sys.argv[3]))
"""


def checked(folder: Path, name: str, plan: str) -> dict[str, Any]:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent)), encoding="utf-8")
    dropout = "0.1" if name.endswith("dropout") else "0"
    words = [sys.executable, str(accel_check.started.__file__), "check-parity", "--json", "--steps", "3"]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = run_command([*words, str(script), name, plan, dropout], timeout=280, env=environment)
    assert finished.stdout, str(finished)
    report: dict[str, Any] = json.loads(finished.stdout)
    return report


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CATALOGUE]
)
def test_a_planted_fault_is_found_and_named(name: str, tmp_path: Path) -> None:
    bug = CATALOGUE[name]
    report = checked(tmp_path, name, bug.plan)
    findings = report["findings"]
    assert report["verdict"] == "differs", report
    assert bug.differs in {one["what"] for one in findings}, report
    if bug.differs == "samples":
        # One process reads the repeated samples as well, so that no parameter differs.
        return
    assert {report["parameter"], report["module"]} & set(bug.first), report
    assert {one["step"] for one in findings} <= {bug.step, bug.step + 1} or bug.differs == "dropout", report
    if bug.ratio is not None:
        ratios = [one["ratio"] for one in findings if one["parameter"]]
        assert ratios[0] == pytest.approx(bug.ratio, rel=1e-3, abs=1e-6), report


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS[1:])
def test_the_run_without_a_fault_is_equal(plan: str, tmp_path: Path) -> None:
    report = checked(tmp_path, "none", plan)
    assert report["verdict"] == "equal", report
