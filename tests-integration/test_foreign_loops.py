"""`accel check-parity` and `accel check-resume` on the catalogue of loops that do not use the library.

The catalogue was written before the checks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from catalogues.foreign_loops import CLEAN, FAULTS, Loop

import accel_check.started
from accel_state.settings.installed import importable
from accel_testing.processes import run_command

pytestmark = [pytest.mark.usefixtures("preloaded_python")]
PRELOADED = ("accel_check.comparison", "accel_check.recorder", "torch.distributed.tensor.parallel")

QUICK = ("sharded", "stream", "resumed", "norm_of_one_shard", "sum_without_division", "resumed_without_scheduler")
"""Entries that every run of the tests checks."""

RESUMING = ["--at", "3", "--steps", "4", "--resume_args", "--resume {checkpoint}"]


def checked(loop: Loop, folder: Path) -> tuple[int, dict[str, Any], str]:
    """The exit code of the check, its report, and all that it says in small letters."""
    script = folder / "train.py"
    script.write_text(loop.script, encoding="utf-8")
    parity = loop.check == "parity"
    options = ["--processes", str(loop.processes), *([] if parity else RESUMING)]
    arguments = [] if parity else ["--folder", str(folder / "checkpoints")]
    words = [sys.executable, str(accel_check.started.__file__), f"check-{loop.check}", "--json", *options]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = run_command([*words, str(script), *arguments], timeout=280, env=environment)
    assert finished.stdout, str(finished)
    return finished.returncode, json.loads(finished.stdout), finished.stdout.lower()


def marked(loops: dict[str, Loop]) -> list[Any]:
    return [
        pytest.param(loop, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, loop in loops.items()
    ]


@pytest.mark.parametrize("loop", marked(CLEAN))
def test_a_right_loop_is_equal(loop: Loop, tmp_path: Path) -> None:
    if loop.needs and not importable(loop.needs):
        pytest.skip(f"needs {loop.needs}: nox -s clients-checks")
    code, report, _ = checked(loop, tmp_path)
    assert (code, report["verdict"]) == (0, "equal"), report


@pytest.mark.parametrize("loop", marked(FAULTS))
def test_a_fault_is_found_with_its_cause(loop: Loop, tmp_path: Path) -> None:
    code, report, text = checked(loop, tmp_path)
    assert code == (0 if loop.also else 1), report
    assert any(cause in text for cause in loop.causes), report


def test_every_kind_of_loop_is_in_the_catalogue() -> None:
    assert len(FAULTS) == 20
    assert len(CLEAN) >= 15
    assert len({loop.truth for loop in FAULTS.values()}) == 20
    for loop in (*CLEAN.values(), *FAULTS.values()):
        compile(loop.script, loop.name, "exec")
