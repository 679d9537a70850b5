"""`accel check-parity` on the catalogue of planted faults of parallel training.

The catalogue was written by an author who had not seen the check.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from catalogues.parallelism_bugs import CATALOGUE, PLANS

from accel_check.check_parity import ParityPlan, check
from accel_check.report import ParityReport
from accel_check.runs import Script

pytestmark = [pytest.mark.usefixtures("preloaded_python")]
PRELOADED = ("accel_torch.accelerator", "accel_torch.check_parity.comparison")

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


def checked(folder: Path, name: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> ParityReport:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    script = folder / "train.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent)), encoding="utf-8")
    dropout = "0.1" if name.endswith("dropout") else "0"
    return check([str(script), name, plan, dropout], ParityPlan(processes=2), steps=3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CATALOGUE]
)
def test_a_planted_fault_is_found_and_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = CATALOGUE[name]
    report = checked(tmp_path, name, bug.plan, monkeypatch)
    assert report.verdict == "differs", report
    assert {report.parameter, report.module} & set(bug.first), report
    assert bug.differs in {one.what for one in report.findings}, report
    assert {one.step for one in report.findings} <= {bug.step, bug.step + 1} or bug.differs == "dropout", report
    if bug.ratio is not None:
        ratios = [one.ratio for one in report.findings if one.parameter]
        assert ratios[0] == pytest.approx(bug.ratio, rel=1e-3, abs=1e-6), report


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS[1:])
def test_the_run_without_a_fault_is_equal(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = checked(tmp_path, "none", plan, monkeypatch)
    assert report.verdict == "equal", report
