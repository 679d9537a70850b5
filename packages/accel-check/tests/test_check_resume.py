"""`accel check-resume`: real runs that are resumed, and what the comparison says of differences."""

from __future__ import annotations

import json
import os
import runpy
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import accel_check.started
from accel_check.continuation import Resumed, compare_resumed, used_state
from accel_check.digests import digests_of, sample_digests
from accel_check.records import RankFacts, Records, StartRecord, StepRecord, TensorPart, write_record
from accel_testing.processes import run_command

pytestmark = pytest.mark.usefixtures("preloaded_python")
PRELOADED = ("accel_torch.accelerator", "accel_check.continuation", "accel_check.recorder")

SCRIPT = str(Path(__file__).with_name("resumed_script.py"))
LOADERS = str(Path(__file__).with_name("resumed_loader_script.py"))
KINDS = runpy.run_path(LOADERS)["KINDS"]


def check(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, str(accel_check.started.__file__), "check-resume", "--cpu", "--json", *arguments]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = run_command(command, timeout=280, env=environment)
    found = [json.loads(line) for line in finished.stdout.splitlines()]
    schema = json.loads(files("accel_check").joinpath("schemas", "check-resume.json").read_text())
    for line in found:
        jsonschema.validate(line, schema)
    return finished.returncode, found


def test_a_run_resumes_on_the_same_and_on_another_number_of_processes() -> None:
    code, (same, other) = check("--at", "4", "--steps", "3", "--processes", "2,3", SCRIPT)
    assert (code, same["verdict"], other["verdict"]) == (0, "equal", "equal"), (same, other)
    used = ["generator numpy", "generator torch", "scheduler 0", "optimizer 0", "weights"]
    assert same["used"] == [*used, "registered object 0 (Linear)"]
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


class InMemory(Records):
    """Records that are in memory, except whole tensors."""

    def __init__(self, folder: Path, ranks: list[list[StepRecord]], **more: Any) -> None:
        self.folder, self._steps = folder, ranks
        self.ranks = [RankFacts(rank, len(ranks), (rank,), more=more) for rank in range(len(ranks))]

    def step(self, rank: int, index: int) -> StepRecord:
        return self._steps[rank][index - 1]

    @property
    def calls(self) -> int:
        return min(map(len, self._steps))


def step(number: int, **changed: Any) -> StepRecord:
    """What a rank records in a step."""
    record = StepRecord(0, number, losses=[number / 10], rates=[0.1], digests={"weight": f"g{number}"})
    record.samples, record.feeds = [[f"id {number}"]], ["train.py:1"]
    record.state = {"weights": {"weight": f"w{number}"}, "scheduler 0": {"last_epoch": str(number)}}
    for name, value in changed.items():
        setattr(record, name, value)
    return record


def run(folder: Path, *resumed: StepRecord, **more: Any) -> Resumed:
    """A run that was resumed after step 1 of 3."""
    straight = InMemory(folder, [[step(1), step(2), step(3)]])
    return Resumed(straight, InMemory(folder, [list(resumed)], **more), 1, 1, 2)


def test_runs_with_equal_records_are_equal(tmp_path: Path) -> None:
    assert compare_resumed(run(tmp_path, step(2), step(3))) is None


def test_a_difference_in_the_loaded_state_comes_first(tmp_path: Path) -> None:
    lost = {"weights": {"weight": "w2"}, "scheduler 0": {"last_epoch": "0"}}
    found = compare_resumed(run(tmp_path, step(2, state=lost, losses=[9.0]), step(3)))
    assert found is not None
    assert (found.loaded, found.step, found.rank) == (True, 1, 0)
    assert str(found).endswith("rank 0: scheduler 0: last_epoch (2 and 0)")


def test_samples_are_named_before_what_they_change(tmp_path: Path) -> None:
    found = compare_resumed(run(tmp_path, step(2, samples=[["id 7"]], losses=[9.0]), step(3)))
    assert found is not None
    assert str(found) == "differs first in step 2 on rank 0: samples (1 of 1 are others)"


def test_a_run_that_ends_early_differs(tmp_path: Path) -> None:
    found = compare_resumed(run(tmp_path, step(2)))
    assert found is not None
    assert (found.step, found.what) == (3, "the run")


def test_a_generator_that_the_script_does_not_use_may_differ(tmp_path: Path) -> None:
    def drawn(record: StepRecord, state: str) -> StepRecord:
        record.state["generator numpy"] = {"state": state}
        return record

    def found(straight: str, resumed: str) -> Any:
        one = InMemory(tmp_path, [[drawn(step(1), "a"), drawn(step(2), straight), drawn(step(3), straight)]])
        other = InMemory(tmp_path, [[drawn(step(2), resumed), drawn(step(3), resumed)]])
        return compare_resumed(Resumed(one, other, 1, 1, 2))

    assert found("a", "z") is None
    assert found("b", "z").what == "generator numpy: state"


def test_another_number_of_processes_is_compared_by_whole_tensors_and_global_order(tmp_path: Path) -> None:
    def wrote(name: str, world: int, values: list[float]) -> Path:
        folder, tensor = tmp_path / name, torch.tensor(values)
        for rank, part in enumerate(tensor.chunk(world)):
            piece = TensorPart(part, (4,), (rank * len(part),))
            write_record(folder / f"rank_{rank}" / f"state_{2 if world == 1 else 1}.pt", StartRecord({"weight": piece}))
        return folder

    def resumed(name: str, values: list[float], ids: tuple[str, str]) -> Resumed:
        straight = InMemory(wrote(f"{name} one", 1, [1.0, 2.0, 3.0, 4.0]), [[step(1), step(2), step(3)]])
        halves = [[step(2, samples=[[one]])] for one in ids]
        return Resumed(straight, InMemory(wrote(f"{name} two", 2, values), halves), 1, 1, 2)

    assert compare_resumed(resumed("equal", [1.0, 2.0, 3.0, 4.0], ("id 2", "id 3"))) is None
    found = compare_resumed(resumed("order", [1.0, 2.0, 3.0, 4.0], ("id 3", "id 2")))
    assert found is not None
    assert found.what == "samples"
    found = compare_resumed(resumed("weights", [1.0, 2.0, 3.0, 5.0], ("id 2", "id 3")))
    assert found is not None
    assert (found.what, found.loaded) == ("weight", True)


def test_state_that_could_be_left_out_unseen_is_named(tmp_path: Path) -> None:
    fresh = {"scheduler 0": {"last_epoch": "2"}, "weights": {"weight": "w0"}}
    used, unseen = used_state(run(tmp_path, step(2), step(3), fresh=fresh))
    assert (used, unseen) == (["scheduler 0", "weights"], ["scheduler 0"])


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
