"""torch_xla for real, with the CPU as its devices: what scripts do through the Accelerator."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from accel_state.settings.probe import importable
from accel_state.testing.processes import Finished, run_command

pytestmark = [
    pytest.mark.skipif(not importable("torch_xla"), reason="needs torch_xla: nox -s engines-xla"),
    pytest.mark.timeout(600),
]

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def run(*argv: str, devices: int = 1, **variables: str) -> Finished:
    there = {"OMP_NUM_THREADS": "1", "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), **variables}
    return run_command([sys.executable, *argv], timeout=500, env=there)


def trained(devices: int = 1, variables: dict[str, str] | None = None, **told: Any) -> dict[str, Any]:
    done = run(str(HERE / "xla_run.py"), json.dumps(told), devices=devices, **(variables or {}))
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stderr
    return dict(json.loads(lines[0].removeprefix("RESULT ")))


@functools.cache
def on_the_cpu(accumulation: int = 1) -> dict[str, Any]:
    """The same script without torch_xla."""
    return trained(variables={"USE_TORCH_XLA": "0"}, accumulation=accumulation)


def test_one_device_trains_like_the_cpu() -> None:
    done, expected = trained(), on_the_cpu()
    assert done["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert (done["type"], done["processes"], done["device"]) == ("XLA", 1, "xla:0")
    assert expected["device"] == "cpu"
    assert done["ends"] == [False] * 5 + [True] + [False] * 5 + [True]
    assert done["seen"] == [4, 4, 4, 4, 4, 1] * 2


def test_shared_parameters_stay_shared_and_are_the_ones_that_train() -> None:
    done, expected = trained(), on_the_cpu()
    assert done["tied"]
    assert done["places"] == ["cpu"]
    for name, value in expected["weights"].items():
        for mine, theirs in zip(done["weights"][name], value, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_two_devices_divide_the_model_and_train_like_one(accumulation: int) -> None:
    done = trained(devices=2, fsdp=True, blocks=["Block"], accumulation=accumulation)
    expected = on_the_cpu(accumulation)
    assert done["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert (done["class"], done["tied"], done["processes"]) == ("Network", True, 1)
    assert all(how.startswith("{devices=[") for how in done["divided"])
    assert done["batch"] == "{devices=[2,1]0,1}"
    assert done["seen"] == [4, 4, 4, 4, 4, 1] * 2


def test_what_was_divided_is_divided_again_after_loading(tmp_path: Path) -> None:
    done = trained(devices=2, fsdp=True, folder=str(tmp_path), epochs=1)
    assert done["divided"]
    assert all(how.startswith("{devices=[") for how in done["divided"])


def test_sharding_may_be_asked_for_by_a_variable() -> None:
    done = trained(devices=2, variables={"ACCEL_XLA_FSDP": "true"}, epochs=1)
    assert done["batch"] == "{devices=[2,1]0,1}"


@pytest.mark.parametrize("told", [{}, {"fsdp": True}])
def test_batches_of_loading_processes_are_sent_ahead_by_threads(told: dict[str, Any]) -> None:
    done, expected = trained(devices=2 if told else 1, workers=1, prefetch=3, **told), on_the_cpu()
    assert done["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert done["ends"] == expected["ends"]


def test_what_a_loading_process_raises_reaches_the_loop() -> None:
    done = run(str(HERE / "xla_run.py"), json.dumps({"workers": 1, "failing": True}))
    assert done.returncode == 1
    assert "the fourth sample is broken" in done.stderr


def test_bf16_stays_near_full_precision() -> None:
    done = trained(precision="bf16")
    assert done["losses"] == pytest.approx(on_the_cpu()["losses"], rel=0.05)
    assert done["losses"] != on_the_cpu()["losses"]


def test_downcasting_holds_weights_in_bf16() -> None:
    import torch

    done = trained(precision="bf16", downcast_bf16=True)
    assert done["losses"] == pytest.approx(on_the_cpu()["losses"], rel=0.1)
    weights = torch.tensor(done["weights"]["first.weight"])
    assert torch.equal(weights, weights.bfloat16().float())
    plain = torch.tensor(on_the_cpu()["weights"]["first.weight"])
    assert not torch.equal(plain, plain.bfloat16().float())


@pytest.mark.parametrize(
    ("told", "variables", "words"),
    [
        ({"precision": "fp16"}, {}, ("NotOffered", "fp16", "mixed_precision='no'")),
        ({"downcast_bf16": True}, {}, ("Conflict", "downcast_bf16", "mixed_precision='bf16'")),
        (
            {},
            {"RANK": "0", "WORLD_SIZE": "2"},
            ("NotOffered", "Several processes on XLA devices", "XLAPlugin(fsdp=True)"),
        ),
        ({"fsdp": True, "blocks": ["Nothing"]}, {}, ("SettingError", "Nothing", "Block")),
        ({}, {"ACCEL_BACKEND": "xla", "ACCELERATE_USE_CPU": "true"}, ("Conflict", "'xla'", "PJRT_DEVICE")),
        ({}, {"ACCELERATE_USE_FSDP": "true"}, ("Conflict", "FSDP", "accel launch")),
    ],
)
def test_what_cannot_run_is_refused_with_a_way_out(
    told: dict[str, Any], variables: dict[str, str], words: tuple[str, ...]
) -> None:
    done = run(str(HERE / "xla_run.py"), json.dumps(told), **variables)
    assert done.returncode == 1
    for word in words:
        assert word in done.stderr


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
