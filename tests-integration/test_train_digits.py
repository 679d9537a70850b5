"""The tutorial's script trains for real on two processes, and a resumed run has the losses of the undisturbed one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from accel_testing.processes import Finished, run_command

ROOT = Path(__file__).parents[1]
SCRIPT = str(ROOT / "docs" / "tutorials" / "train_digits.py")
LAUNCH = [sys.executable, "-m", "accel_cli.main", "launch", "--cpu", "--num_processes", "2"]


pytestmark = pytest.mark.usefixtures("preloaded_python")
PRELOADED = ("accel_torch.accelerator", "sklearn.datasets")


def train(output: Path, *arguments: str) -> Finished:
    return run_command(
        [*LAUNCH, "--mixed_precision", "bf16", SCRIPT, "--output", str(output), *arguments],
        timeout=240,
        env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


def losses(output: Path) -> dict[int, float]:
    """Logged losses by step."""
    found = {}
    for path in output.rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            values = record.get("values", record)
            if "loss" in values:
                found[record["step"]] = values["loss"]
    return found


def accuracy_shown(run: Finished) -> str:
    return run.stdout.split("Test accuracy: ")[1].split("\n")[0]


def test_the_tutorial_trains_and_its_resume_is_exact(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"

    first = train(whole, "--epochs", "8")
    assert first.returncode == 0, first.stdout + first.stderr
    checkpoint = whole / "middle"
    assert (checkpoint / "model.safetensors").is_file()
    assert f"Checkpoint: {checkpoint}" in first.stdout
    accuracy = float(accuracy_shown(first).rstrip("%"))
    assert accuracy > 95
    assert first.stdout.count("Test accuracy") == 1
    assert "training" in first.stderr

    second = train(resumed, "--epochs", "8", "--resume_from", str(checkpoint))
    assert second.returncode == 0, second.stdout + second.stderr
    before, after = losses(whole), losses(resumed)
    assert 0 < len(after) < len(before)
    assert after == {step: before[step] for step in after}
    assert max(after) == max(before)
    assert accuracy_shown(second) == accuracy_shown(first)
