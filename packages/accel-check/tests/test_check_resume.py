"""`accel check-resume`: real runs that are resumed, and what the comparison says of differences."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_testing.processes import run_command
from accel_torch.check_resume.comparison import Notes, compare_notes, controls
from accel_torch.check_resume.digests import digests_of, sample_digests

pytestmark = pytest.mark.usefixtures("preloaded_python")

SCRIPT = str(Path(__file__).with_name("resumed_script.py"))
LOADERS = str(Path(__file__).with_name("resumed_loader_script.py"))
KINDS = runpy.run_path(LOADERS)["KINDS"]


def check(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "accel_cli.main", "check-resume", "--cpu", "--json", *arguments]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = run_command(command, timeout=280, env=environment)
    return finished.returncode, [json.loads(line) for line in finished.stdout.splitlines()]


def test_a_run_resumes_on_the_same_and_on_another_number_of_processes() -> None:
    code, (same, other) = check("--at", "4", "--steps", "3", "--processes", "2,3", SCRIPT)
    assert (code, same["verdict"], other["verdict"]) == (0, "equal", "equal"), (same, other)
    used = ["loader 0", "generator numpy_random_seed", "generator torch_manual_seed", "scheduler 0", "optimizer 0"]
    assert same["used"] == [*used, "weights of model 0", "registered object 0 (Linear)"]
    assert same["unsaved"] == ["count in main()"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "verdict", "what"),
    [
        ("average", "differs", "the variable average in main()"),
        ("generator", "differs", "loss"),
        ("clock", "not verified", "loss"),
        ("position", "differs", "samples"),
        ("unprepared", "not verified", ""),
    ],
)
def test_a_fault_of_the_script_is_named(fault: str, verdict: str, what: str) -> None:
    code, (outcome,) = check("--at", "4", "--steps", "3", SCRIPT, fault)
    assert (code, outcome["verdict"]) == ({"differs": 1, "not verified": 3}[verdict], verdict), outcome
    assert outcome["what"].startswith(what)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["single", "ddp", "fsdp1", "fsdp2"])
def test_a_sharded_run_resumes(backend: str) -> None:
    count = "1" if backend == "single" else "2"
    code, (outcome,) = check("--backend", backend, "--at", "4", "--steps", "3", "--processes", count, SCRIPT, "sharded")
    assert code == 0, outcome


@pytest.mark.slow
def test_a_run_whose_layers_are_cut_resumes() -> None:
    code, (outcome,) = check("--at", "4", "--steps", "3", "--processes", "2", SCRIPT, "tensor-parallel")
    assert code == 0, outcome


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_loaders_of_each_kind_raise_no_alarm(kind: str) -> None:
    if "stateful" in kind:
        pytest.importorskip("torchdata", reason="wraps the loader of torchdata, an optional library")
    # The second checkpoint is of the first step of an epoch, or of the one after.
    code, found = check("--at", "3,6", "--steps", "4", "--processes", "2", LOADERS, kind)
    assert (code, [outcome["verdict"] for outcome in found]) == (0, ["equal"] * 2), found


def test_a_script_that_makes_too_few_steps_is_not_verified() -> None:
    code, (outcome,) = check("--at", "500", SCRIPT)
    assert (code, outcome["reason"]) == (
        3,
        "the uninterrupted run failed: the script made 54 steps; give --at less than that",
    )


@pytest.mark.parametrize("arguments", [("--at", "0", SCRIPT), ("no_such_script.py",)])
def test_what_cannot_be_checked_is_refused(arguments: tuple[str, ...]) -> None:
    assert check(*arguments)[0] == 2


# ---------------------------------------------------------------- comparison


def note(step: int, **pieces: str) -> dict[str, Any]:
    """What a rank notes after a step."""
    groups = {name.replace("_", " "): {"value": digest} for name, digest in pieces.items()}
    return {"step": step, "pieces": groups, "full": groups, "samples": [[0, 0, [f"id {step}"]]], "losses": [step / 10]}


def beginning(step: int, fresh: dict[str, str] | None = None, **pieces: str) -> dict[str, Any]:
    """What a rank notes before its first step."""
    made = note(step, **pieces)
    fresh_groups = note(step, **(fresh or {}))["pieces"]
    return {"step": step, "loaded": True, "pieces": made["pieces"], "full": made["full"], "fresh": fresh_groups}


def straight_run() -> Notes:
    steps = [note(step, weights=f"w{step}") for step in (1, 2, 3)]
    saved = {**{name: steps[0][name] for name in ("step", "pieces", "full")}, "saved": True}
    return Notes([[beginning(0, weights="w0"), steps[0], saved, *steps[1:]]])


def test_runs_with_equal_notes_are_equal() -> None:
    resumed = Notes([[beginning(1, weights="w1"), note(2, weights="w2"), note(3, weights="w3")]])
    assert compare_notes(straight_run(), resumed, 1) is None


def test_a_difference_in_the_loaded_state_comes_first() -> None:
    resumed = Notes([[beginning(1, weights="w0"), note(2, weights="other"), note(3, weights="w3")]])
    found = compare_notes(straight_run(), resumed, 1)
    assert found is not None
    assert (found.loaded, found.step, found.rank, found.what) == (True, 1, 0, "weights: value")


def test_samples_are_named_before_the_weights_that_they_change() -> None:
    later = {**note(2, weights="other"), "samples": [[0, 0, ["id 7"]]]}
    found = compare_notes(straight_run(), Notes([[beginning(1, weights="w1"), later]]), 1)
    assert found is not None
    assert str(found) == "differs first after step 2 on rank 0: samples (1 of 1 are others)"


def test_a_run_that_ends_early_differs() -> None:
    resumed = Notes([[beginning(1, weights="w1"), note(2, weights="w2")]])
    found = compare_notes(straight_run(), resumed, 1)
    assert found is not None
    assert (found.step, found.what) == (3, "the run")


def test_another_number_of_processes_is_compared_by_full_state_and_global_order() -> None:
    steps = [note(2, weights="w2"), note(3, weights="w3")]
    other = [{**one, "samples": [[0, 0, [f"id {one['step'] + 2}"]]]} for one in steps]
    loaded = beginning(1, weights="w1")
    halves = [
        [loaded, {**note(2), "samples": [[0, 0, ["id 2"]]]}],
        [loaded, {**note(2), "samples": [[0, 0, ["id 3"]]]}],
    ]
    assert compare_notes(straight_run(), Notes(halves), 1) is None
    found = compare_notes(straight_run(), Notes([[loaded, *steps], [loaded, *other]]), 1)
    assert found is not None
    assert found.what == "samples"


def test_state_that_could_be_left_out_unseen_is_named() -> None:
    straight = straight_run()
    seen = Notes([[beginning(1, {"weights": "fresh"}, weights="w1")]])
    unseen = Notes([[beginning(1, {"weights": "w1"}, weights="w1")]])
    assert controls(straight, seen, 1) == (["weights"], [])
    assert controls(straight, unseen, 1) == (["weights"], ["weights"])


def test_digests_tell_values_types_and_shapes_apart() -> None:
    states = [
        torch.zeros(2),
        torch.zeros(2, 1),
        torch.zeros(2, dtype=torch.float64),
        torch.tensor([0.0, -0.0]),
        [0.0, 0.0],
    ]
    digests = [str(digests_of({"x": state})) for state in states]
    assert len(set(digests)) == len(states)
    assert digests_of({"x": torch.ones(3)[::2]}) == digests_of({"x": torch.ones(2)})


def test_a_sample_has_the_same_digest_in_every_batch() -> None:
    inputs, targets = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    whole = sample_digests({"inputs": inputs, "targets": targets, "scale": torch.ones(1)})
    assert whole == sample_digests(
        {"inputs": inputs[:2], "targets": targets[:2], "scale": torch.ones(1)}
    ) + sample_digests({"inputs": inputs[2:], "targets": targets[2:], "scale": torch.ones(1)})
    assert len(set(whole)) == 6
