"""Launched runs with a guard of steps: what the status says, and what the restart policy makes of a cause."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_testing.processes import Finished, run_command

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.usefixtures("preloaded_python"),
]

SCRIPT = """
import subprocess, sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from accel_torch import Accelerator, StepGuard

action, fault = sys.argv[1:]
accelerator = Accelerator(cpu=True, kwargs_handlers=[StepGuard(nonfinite=action)])
Path(f"start_{accelerator.process_index}").open("a").write("started ")
data = torch.ones(64, 4)
if fault == "data":
    data[13] = float("nan")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 4))
for step, inputs in enumerate(loader, 1):
    if fault == "numerics" and step == 5:
        optimizer.param_groups[0]["lr"] = 1e38
    accelerator.backward(model(inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()
if accelerator.is_main_process:
    status = [sys.executable, "-m", "accel_cli.main", "runs", "status", "run", *sys.argv[3:]]
    text = ""
    # Processes publish their status about once a second.
    while text.count("nonfinite") < 2:
        text = subprocess.run([*status, "--json"], capture_output=True, text=True, check=True).stdout
    Path("status.json").write_text(text)
    Path("status.txt").write_text(subprocess.run(status, capture_output=True, text=True).stdout)
accelerator.wait_for_everyone()
"""


def launched(folder: Path, *arguments: str, options: tuple[str, ...] = ()) -> Finished:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "accel_cli.main", "launch", "--cpu", "--num_processes", "2"]
    environment = {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    command += ["--project_dir", "run", *options, "train.py", *arguments]
    return run_command(command, timeout=280, env=environment, cwd=folder)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_status_of_a_run_tells_the_last_bad_step_of_each_process(tmp_path: Path) -> None:
    finished = launched(tmp_path, "skip", "data")
    assert finished.returncode == 0, finished.stderr
    (run,) = lines_of(tmp_path / "status.json")
    assert [one["bad_step"] for one in run["processes"]] == ["step 2: nonfinite loss (data), skip"] * 2
    text = (tmp_path / "status.txt").read_text()
    assert all(f"rank {rank}: the last bad step was step 2: nonfinite loss (data), skip." in text for rank in (0, 1))
    (event,) = lines_of(tmp_path / "run" / "events.jsonl")
    assert (event["step"], event["cause"], event["ranks"]) == (2, "data", [1])


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        ("data", "two failures with the same samples: 12, 13, 14, 15"),
        ("numerics", "the same failure occurred again without progress"),
    ],
)
def test_the_restart_policy_knows_the_cause(tmp_path: Path, cause: str, reason: str) -> None:
    options = ("--restart_policy", "auto", "--max_restarts", "5")
    finished = launched(tmp_path, "raise", cause, options=options)
    assert finished.returncode != 0
    first, second = lines_of(tmp_path / "run" / "failures.jsonl")
    assert [first["kind"], second["kind"]] == [cause] * 2
    assert [first["action"], second["action"]] == ["restart", "stop"]
    assert second["reason"].startswith(reason)
    assert f"Not started again: {reason}" in finished.stderr
    assert [len((tmp_path / f"start_{rank}").read_text().split()) for rank in (0, 1)] == [2, 2]
    assert [line["cause"] for line in lines_of(tmp_path / "run" / "events.jsonl")] == [cause] * 2
