"""The session for machines with a GPU, tried without one: what it finds, how it goes on after a test that dies."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from accel_testing.processes import run_command

ROOT = Path(__file__).resolve().parents[1]
SESSION = ROOT / "tools" / "gpu" / "session.py"

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")

TOPICS = (
    "test_each_collective_with_a_device_for_each_process",
    "test_each_collective_of_two_processes_over_gloo",
    "test_an_overflow_skips_the_step_and_halves_the_scale",
    "test_a_copy_to_the_device_is_computed_with_at_once",
    "test_without_room_for_reading_ahead_everything_is_still_computed",
    "test_what_is_saved_is_the_moment_of_the_call",
    "test_batches_become_smaller_until_one_fits",
    "test_the_estimate_of_training_is_near_the_peak",
    "test_accumulated_losses_are_those_of_the_plain_model",
    "TestSingleOnCUDA",
    "TestDDPOnCUDA",
    "TestFSDP2OnCUDA",
    "TestFSDP2OffloadedOnCUDA",
    "test_what_a_device_wrote_a_cpu_reads",
    "test_a_seed_repeats_what_the_device_draws",
    "test_a_saved_state_of_all_generators_repeats_what_the_device_draws",
    "test_losses_stay_near_those_of_full_precision",
    "test_batches_are_computed_with_at_once",
    "test_a_divided_model_trains_like_a_whole_one",
)


@no_gpu
def test_without_cuda_it_shows_what_it_would_run_and_ends_well() -> None:
    shown = run_command([sys.executable, str(SESSION)], timeout=200)
    assert shown.returncode == 0, shown.stderr
    *listing, total, why = shown.stdout.splitlines()
    assert why.endswith("finds no GPU, so nothing was run.")
    tests, differences = listing[0::2], listing[1:-1:2]
    assert total == f"{len(differences)} tests"
    assert all(line.startswith("    ") and line.strip() for line in differences)
    assert not [topic for topic in TOPICS if topic not in shown.stdout]
    assert all("::" in test for test in tests if test)


def test_each_module_with_tests_for_gpus_has_its_place_in_the_order() -> None:
    sys.path.insert(0, str(SESSION.parent))
    try:
        import session  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    found = {
        path.stem
        for path in [*ROOT.glob("packages/*/tests/test_*.py"), *ROOT.glob("tests-integration/test_*.py")]
        if any(word in path.read_text(encoding="utf-8") for word in ("mark.cuda(differs", "@on_devices("))
    }
    assert found - {Path(__file__).stem} == set(session.ORDER)


@no_gpu
@pytest.mark.slow
def test_a_run_on_the_cpu_is_reported(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    done = run_command(
        [sys.executable, str(SESSION), "--device", "cpu", "-k", "test_copies", "--report", str(report)], timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(report.with_suffix(".json").read_text(encoding="utf-8"))
    assert written["head"]["outcomes"] == {"passed": 5}
    assert written["head"]["torch"] == torch.__version__
    assert "No GPU took part" in report.read_text(encoding="utf-8")


HOSTILE = """
import os, time
import torch
from accel_testing.plugin import on_devices

@on_devices("cpu", differs="nothing")
def test_a(device):
    assert device.type == "cpu"

@on_devices("cpu", differs="nothing")
def test_b_dies(device):
    os._exit(7)

@on_devices("cpu", differs="nothing")
def test_c(device):
    pass

@on_devices("cpu", differs="nothing")
def test_d_hangs(device):
    time.sleep(1000)

@on_devices("cpu", differs="nothing")
def test_e_fails(device):
    assert 1 + 1 == 3

@on_devices("cpu", differs="nothing")
def test_f_takes_too_long(device):
    time.sleep(1000)
"""

DRIVER = """
import sys
from pathlib import Path
import session
folder = Path(sys.argv[1])
session.Session._files = lambda self: [str(folder / "test_hostile.py")]
session.ROOT = folder
session.LONGEST = 6.0
in_time = session.Session.left
session.Session.left = lambda self: 0.0 if len(self.results) == 5 else in_time(self)
sys.argv = ["session", "--device", "cpu", "--report", str(folder / "report.md")]
sys.exit(session.main())
"""


@no_gpu
@pytest.mark.slow
def test_a_test_that_dies_or_hangs_costs_itself_only_and_time_ends_all(tmp_path: Path) -> None:
    (tmp_path / "test_hostile.py").write_text(HOSTILE, encoding="utf-8")
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    done = run_command(command, timeout=280, env={"PYTHONPATH": str(SESSION.parent)})
    written = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert written["troubles"] == []
    assert {row["test"].partition("::")[2]: row["outcome"] for row in written["tests"]} == {
        "test_a[cpu]": "passed",
        "test_b_dies[cpu]": "died (exit code 7)",
        "test_c[cpu]": "passed",
        "test_d_hangs[cpu]": "hung",
        "test_e_fails[cpu]": "failed",
        "test_f_takes_too_long[cpu]": "not run",
    }
    assert done.returncode == 1
    assert "1 + 1" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_mark_that_does_not_say_what_differs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_silent.py").write_text(
        "import pytest\n\n@pytest.mark.cuda\ndef test_nothing():\n    pass\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "pytest", "-p", "accel_testing.plugin", "-p", "no:cacheprovider"]
    done = run_command([*command, str(tmp_path)], env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    assert done.returncode == 4
    assert "does not state what is different on a GPU" in done.stderr
