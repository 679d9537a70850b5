"""DeepSpeed's states after a kill, on another number of processes, and under `accel check-resume`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state.settings.installed import importable
from accel_testing.processes import Finished, run_command

pytestmark = [
    pytest.mark.skipif(not importable("deepspeed"), reason="needs deepspeed: nox -s engines-deepspeed"),
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("preloaded_python"),
]
PRELOADED = ("deepspeed", "accel_torch.accelerator")

SCRIPT = Path(__file__).with_name("deepspeed_resume.py")
CHECKED = Path(__file__).parents[2] / "packages/accel-check/tests/resumed_script.py"
BIN = Path(sys.executable).parent


def accel(*arguments: Any) -> Finished:
    # Engines compile C++ with ninja, which is beside the interpreter.
    path = os.pathsep.join((str(BIN), os.environ["PATH"]))
    environment = {"PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return run_command([str(BIN / "accel"), *map(str, arguments)], timeout=500, env=environment)


def train(folder: Path, *options: Any, processes: int = 2) -> Finished:
    folder.mkdir(exist_ok=True)
    launch = ("launch", "--cpu", "--use_deepspeed", "--num_processes", processes, "--max_restarts", 1)
    return accel(*launch, SCRIPT, folder, *options)


def losses(folder: Path) -> dict[str, set[str]]:
    """The losses of each step; more than one where a repeated step has another."""
    found: dict[str, set[str]] = {}
    for line in (folder / "losses").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(step, set()).add(loss)
    return found


def assert_equal_states(one: Path, other: Path) -> None:
    ours, theirs = torch.load(one), torch.load(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("stage", [2, 3])
def test_a_killed_run_ends_with_the_bits_of_the_undisturbed_one(stage: int, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = train(whole, "--stage", stage)
    assert done.returncode == 0, done.stderr
    done = train(killed, "--stage", stage, "--kill_at", 8)
    assert done.returncode == 0, done.stderr
    assert len((killed / "losses").read_text().splitlines()) > 12  # steps after the checkpoint were made again
    assert losses(killed) == losses(whole)
    assert_equal_states(killed / "final.pt", whole / "final.pt")


@pytest.mark.parametrize(("stage", "saved_on", "loaded_on"), [(2, 2, 1), (2, 1, 2), (3, 2, 1), (3, 1, 2), (1, 2, 3)])
def test_another_number_of_processes_goes_on_from_a_universal_checkpoint(
    stage: int, saved_on: int, loaded_on: int, tmp_path: Path
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    # Without dropout, whose generators belong to processes.
    plain = ("--stage", stage, "--dropout", 0)
    done = train(one, *plain, "--steps", 6, processes=saved_on)
    assert done.returncode == 0, done.stderr
    checkpoint = one / "checkpoints" / "checkpoint_1"
    resumed = (*plain, "--steps", 9, "--load", checkpoint)

    refused = train(other, *resumed, processes=loaded_on)
    assert refused.returncode != 0
    place = checkpoint / "pytorch_model"
    command = f"python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {place} "
    command += f"--output_folder {place}_universal"
    assert command in refused.stderr
    assert '"checkpoint": {"load_universal": true}' in refused.stderr
    assert not (other / "losses").exists()

    converted = run_command([sys.executable, *command.split()[1:]], timeout=200)
    assert converted.returncode == 0, converted.stderr
    done = train(other, *resumed, "--universal", processes=loaded_on)
    assert done.returncode == 0, done.stderr
    assert_equal_states(other / "loaded.pt", one / "final.pt")

    # As many processes as before go on alike, with sums in another order.
    done = train(one, *plain, "--steps", 9, processes=saved_on)
    assert done.returncode == 0, done.stderr
    ours, theirs = losses(other), losses(one)
    for step in ("7", "8", "9"):
        assert float.fromhex(*ours[step]) == pytest.approx(float.fromhex(*theirs[step]), rel=1e-4)
    straight = torch.load(one / "final.pt")
    for name, value in torch.load(other / "final.pt").items():
        torch.testing.assert_close(value, straight[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("stage", "fault", "verdict"),
    [*((stage, "sharded", "equal") for stage in (1, 2, 3)), (2, "average", "differs")],
)
def test_a_checked_run_resumes_unless_it_leaves_state_out(stage: int, fault: str, verdict: str, tmp_path: Path) -> None:
    # Without a threshold, stage 3 divides parameters as small as these, too.
    table = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    config = tmp_path / "deepspeed.json"
    config.write_text(json.dumps(table))
    launch = f"--launch=--use_deepspeed --deepspeed_config_file {config}"
    steps = ("--cpu", "--json", "--at", 4, "--steps", 2, "--processes", 2)
    done = accel("check-resume", *steps, launch, CHECKED, fault)
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert (outcome["verdict"], done.returncode) == (verdict, {"equal": 0, "differs": 1}[verdict]), outcome
    if verdict == "equal":
        assert {"optimizer 0", "scheduler 0"} <= set(outcome["used"])
    else:
        assert outcome["what"] == "the variable average in main()"
