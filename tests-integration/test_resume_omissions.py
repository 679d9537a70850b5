"""`accel check-resume` on the catalogue of scripts that leave state out of their checkpoints.

The catalogue was written by an author who had not seen the check.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from catalogues.resume_omissions import CATALOGUE

import accel_check.started
from accel_testing.processes import run_command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preloaded_python")]
PRELOADED = ("accel_torch.accelerator", "accel_check.continuation", "accel_check.recorder")

AT = {"gradients_of_an_open_window": 3, "scaler_of_the_script": 8}
"""The step of the checkpoint, of scripts that make fewer steps than they read batches; 15 of others."""

IN_WINDOW = {"gradients_of_an_open_window"}
"""Entries that a checkpoint between two steps does not show."""


def check(folder: Path, name: str, omit: bool) -> tuple[int, dict[str, Any]]:
    script = folder / "train.py"
    (folder / "run").mkdir()
    script.write_text(CATALOGUE[name].script(omit=omit), encoding="utf-8")
    where = ["--at", str(AT.get(name, 15)), "--steps", "3", "--processes", str(CATALOGUE[name].processes)]
    where += ["--in_window"] if name in IN_WINDOW else []
    command = [sys.executable, str(accel_check.started.__file__), "check-resume", "--cpu", "--json", *where]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = run_command([*command, str(script), "--folder", str(folder / "run")], timeout=380, env=environment)
    assert finished.stdout, str(finished)
    return finished.returncode, json.loads(finished.stdout)


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_omission_is_found(name: str, tmp_path: Path) -> None:
    code, outcome = check(tmp_path, name, omit=True)
    assert code == 1, outcome


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_same_script_without_the_omission_is_equal(name: str, tmp_path: Path) -> None:
    code, outcome = check(tmp_path, name, omit=False)
    assert code == 0, outcome
