"""torch_xla for real, with the CPU as its devices: what scripts do through the Accelerator."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state.settings.installed import importable
from accel_testing.processes import Finished, run_command

pytestmark = [
    pytest.mark.skipif(not importable("torch_xla"), reason="needs torch_xla: nox -s engines-xla"),
    pytest.mark.timeout(600),
]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def run(*argv: str, devices: int = 1, **variables: str) -> Finished:
    there = {"OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), **variables}
    return run_command([sys.executable, *argv], timeout=500, env=there)


def ran(devices: int, cases: dict[str, Any], **variables: str) -> dict[str, Any]:
    """What each of the cases came to, in one process."""
    done = run(str(HERE / "xla_run.py"), json.dumps(cases), devices=devices, **variables)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stderr
    return dict(json.loads(lines[0].removeprefix("RESULT ")))


ELSEWHERE = {"RANK": "0", "WORLD_SIZE": "2"}
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "fp16": ({"precision": "fp16"}, ("NotOffered", "fp16", "mixed_precision='no'")),
    "full precision": ({"downcast_bf16": True}, ("Conflict", "downcast_bf16", "mixed_precision='bf16'")),
    "downcasting late": ({"downcast_bf16": True, "precision": "bf16"}, ("NotReady", "was used before", "XLA_DOWNCAST")),
    "sharding late": ({"fsdp": True}, ("NotReady", "was used before", "ACCEL_XLA_FSDP=true")),
    "several processes": ({"variables": ELSEWHERE}, ("NotOffered", "several processes", "XLAPlugin(fsdp=True)")),
    "on the CPU": ({"variables": {"ACCEL_BACKEND": "xla", "ACCELERATE_USE_CPU": "1"}}, ("Conflict", "PJRT_DEVICE")),
    "torch's FSDP": ({"variables": {"ACCELERATE_USE_FSDP": "true"}}, ("Conflict", "FSDP", "accel launch")),
    "reading": ({"workers": 1, "failing": True}, ("ValueError", "the fourth sample is broken")),
}


@functools.cache
def on_the_cpu() -> dict[str, Any]:
    """The same script without torch_xla."""
    return ran(1, {"plain": {}, "window": {"accumulation": 4}}, USE_TORCH_XLA="0")


@functools.cache
def on_one_device() -> dict[str, Any]:
    accepted = {"plain": {}, "ahead": {"workers": 1, "prefetch": 3}, "bf16": {"precision": "bf16"}}
    return ran(1, {**accepted, **{name: told for name, (told, _) in REFUSED.items()}})


@functools.cache
def on_two_devices() -> dict[str, Any]:
    cases = {
        "plain": {"blocks": ["Block"]},
        "window": {"accumulation": 4},
        "ahead": {"workers": 1, "prefetch": 3},
        "unknown": {"blocks": ["Nothing"]},
        "saved": {"epochs": 1, "saves": True},
    }
    return ran(2, {name: {"fsdp": True, **told} for name, told in cases.items()})


def test_one_device_trains_like_the_cpu() -> None:
    done, expected = on_one_device()["plain"], on_the_cpu()["plain"]
    assert done["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert (done["type"], done["processes"], done["device"]) == ("XLA", 1, "xla:0")
    assert expected["device"] == "cpu"
    assert done["ends"] == [False] * 5 + [True] + [False] * 5 + [True]
    assert done["seen"] == [4, 4, 4, 4, 4, 1] * 2


def test_shared_parameters_stay_shared_and_are_the_ones_that_train() -> None:
    done, expected = on_one_device()["plain"], on_the_cpu()["plain"]
    assert done["tied"]
    assert done["places"] == ["cpu"]
    for name, value in expected["weights"].items():
        assert torch.allclose(torch.tensor(done["weights"][name]), torch.tensor(value), atol=1e-4)


@pytest.mark.parametrize("case", ["plain", "window"])
def test_two_devices_divide_the_model_and_train_like_one(case: str) -> None:
    done, expected = on_two_devices()[case], on_the_cpu()[case]
    assert done["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert (done["class"], done["tied"], done["processes"]) == ("Network", True, 1)
    assert divided(done)
    assert done["batch"] == "{devices=[2,1]0,1}"
    assert done["seen"] == [4, 4, 4, 4, 4, 1] * 2


def test_what_was_divided_is_divided_again_after_loading() -> None:
    assert divided(on_two_devices()["saved"])


def divided(done: dict[str, Any]) -> bool:
    """Whether each parameter and each state of the optimizer is divided."""
    return bool(done["divided"]) and all(how.startswith("{devices=[") for how in done["divided"])


@pytest.mark.parametrize("answers", [on_one_device, on_two_devices])
def test_batches_of_loading_processes_are_sent_ahead_by_threads(answers: Callable[[], dict[str, Any]]) -> None:
    done, expected = answers()["ahead"], on_the_cpu()["plain"]
    assert done["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert done["ends"] == expected["ends"]


def test_bf16_stays_near_full_precision() -> None:
    done, expected = on_one_device()["bf16"], on_the_cpu()["plain"]
    assert done["losses"] == pytest.approx(expected["losses"], rel=0.05)
    assert done["losses"] != expected["losses"]


def test_downcasting_holds_weights_in_bf16() -> None:
    done, expected = ran(1, {"bf16": {"precision": "bf16", "downcast_bf16": True}})["bf16"], on_the_cpu()["plain"]
    assert done["losses"] == pytest.approx(expected["losses"], rel=0.15)
    for answer, narrow in ((done, True), (expected, False)):
        weights = torch.tensor(answer["weights"]["first.weight"])
        assert torch.equal(weights, weights.bfloat16().float()) is narrow


def test_sharding_may_be_asked_for_by_a_variable_and_seeding_does_not_come_too_early() -> None:
    done = ran(2, {"plain": {"epochs": 1, "seed_first": True}}, ACCEL_XLA_FSDP="true")["plain"]
    assert done["batch"] == "{devices=[2,1]0,1}"
    assert done["losses"] == pytest.approx(on_the_cpu()["plain"]["losses"][:6], rel=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_a_way_out(name: str) -> None:
    refused, (_, words) = on_one_device()[name], REFUSED[name]
    assert refused["error"] == words[0]
    assert [word for word in words[1:] if word not in refused["text"]] == []


def test_blocks_that_the_model_does_not_have_are_refused() -> None:
    refused = on_two_devices()["unknown"]
    assert refused["error"] == "SettingError"
    assert "Block" in refused["text"]


def test_the_tutorial_trains_and_resumes(tmp_path: Path) -> None:
    script = str(ROOT / "docs" / "tutorials" / "train_digits.py")
    first = run(script, "--output", str(tmp_path / "a"))
    assert first.returncode == 0, first.stderr
    again = run(script, "--output", str(tmp_path / "b"), "--resume_from", str(tmp_path / "a" / "middle"))
    assert again.returncode == 0, again.stderr
    assert "Resumed in epoch 4" in again.stdout
    before, after = (losses(tmp_path / name) for name in "ab")
    assert 0 < len(after) < len(before)
    assert {step: before[step] for step in after} == after


def losses(folder: Path) -> dict[int, float]:
    """By step, from the tracker's files."""
    found = {}
    for path in folder.rglob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            values = record.get("values", record)
            if "loss" in values:
                found[record["step"]] = values["loss"]
    return found


def test_the_launcher_starts_a_function_where_torch_xla_has_one_device(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from accel_torch import Accelerator\n\n\ndef main():\n    accelerator = Accelerator()\n"
        "    print('RESULT', accelerator.device, accelerator.num_processes)\n",
        encoding="utf-8",
    )
    done = run("-m", "accel_cli.main", "launch", "--tpu", "--main_training_function", "main", str(script))
    assert done.returncode == 0, done.stderr
    assert "RESULT xla:0 1" in done.stdout
