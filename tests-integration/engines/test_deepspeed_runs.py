"""DeepSpeed for real, on two processes: its losses are those of plain data parallelism, whatever it divides."""

from __future__ import annotations

import functools
import json
import os
import pickle
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

# What DeepSpeed asks the processor for.
HAS_FP16 = torch.ops.mkldnn._is_mkldnn_fp16_supported()
fp16 = pytest.mark.skipif(not HAS_FP16, reason="DeepSpeed trains in fp16 where oneDNN of the processor does")

RUN = Path(__file__).parent / "deepspeed_run.py"
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
WARMUP = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    }
}


def launch(processes: int | None = 2, **told: Any) -> Finished:
    """Run the script in some processes of torchrun; None starts it by itself."""
    torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--standalone")
    command = (sys.executable, *(torchrun if processes is not None else ()), str(RUN))
    # The engine compiles a piece of C++ with ninja, which is beside the interpreter.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return run_command([*command, json.dumps(told)], timeout=250, env={"PATH": path, "OMP_NUM_THREADS": "1"})


def result(**told: Any) -> dict[str, Any]:
    return reported(launch(**told))


def reported(done: Finished) -> dict[str, Any]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stderr
    return dict(json.loads(lines[0].removeprefix("RESULT ")))


@functools.cache
def expected(precision: str, accumulation: int = 1) -> list[float]:
    losses: list[float] = result(precision=precision, accumulation=accumulation)["losses"]
    return losses


@pytest.mark.parametrize(
    ("precision", "tolerance", "stage"),
    [
        *(("no", 1e-4, stage) for stage in range(4)),
        *(("bf16", 0.05, stage) for stage in range(4)),
        *(pytest.param("fp16", 0.01, stage, marks=fp16) for stage in range(1, 4)),
    ],
)
def test_every_stage_trains_like_data_parallelism(precision: str, tolerance: float, stage: int) -> None:
    # Without a threshold, stage 3 divides parameters as small as these, too.
    divides = {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    table = {"zero_optimization": {"stage": stage, **divides}, "gradient_clipping": 1.0}
    done = result(plugin={"hf_ds_config": table}, precision=precision)
    assert done["losses"] == pytest.approx(expected(precision), abs=tolerance)
    assert (done["model"], done["inner"]) == ("DeepSpeedEngine", "Sequential")


@pytest.mark.parametrize("stage", [1, 3])
def test_accumulation_is_that_of_the_run(stage: int) -> None:
    plugin = {"zero_stage": stage, "gradient_clipping": 1.0, "zero3_save_16bit_model": True}
    done = result(plugin=plugin, accumulation=2)
    assert done["losses"] == pytest.approx(expected("no", 2), abs=1e-4)
    assert done["weights"] == {"0.weight": [16, 8], "0.bias": [16], "2.weight": [2, 16], "2.bias": [2]}


def test_the_run_accumulates_as_the_configuration_says() -> None:
    table = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    assert result(plugin={"hf_ds_config": table})["losses"] == pytest.approx(expected("no", 2), abs=1e-4)


@pytest.mark.parametrize("stage", [1, 3])
def test_only_a_scheduler_outside_of_prepare_is_warned_about(stage: int) -> None:
    plugin = {"zero_stage": stage, "gradient_clipping": 1.0, "zero3_save_16bit_model": True}
    right, wrong = (launch(plugin=plugin, accumulation=2, schedules_itself=itself) for itself in (False, True))
    assert "MisuseWarning" not in right.stderr
    assert "MisuseWarning: A learning-rate scheduler steps within an accumulation window." in wrong.stderr
    assert [reported(done)["watched"] for done in (right, wrong)] == [False, False]


@pytest.mark.parametrize(
    "offload",
    [
        {"zero_stage": 2, "offload_optimizer_device": "cpu"},
        {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
    ],
)
def test_states_kept_on_the_host_train_alike(offload: dict[str, Any]) -> None:
    done = result(plugin={**offload, "gradient_clipping": 1.0})
    assert done["losses"] == pytest.approx(expected("no"), abs=1e-4)


def test_optimizer_and_schedule_come_from_the_configuration() -> None:
    done = result(plugin={"zero_stage": 2, "gradient_clipping": 1.0, **ADAM, **WARMUP}, dummies=True)
    assert len(done["losses"]) == 16
    assert done["losses"][-1] < done["losses"][0]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_resume_gives_the_losses_of_the_undisturbed_run(stage: int, tmp_path: Path) -> None:
    plugin = {"zero_stage": stage, "gradient_clipping": 1.0}
    folder = str(tmp_path / "checkpoint")
    whole = result(plugin=plugin, save=folder)["losses"]
    assert result(plugin=plugin, load=folder)["losses"] == whole[8:]


def test_checkpoints_that_do_not_fit_or_bring_code_are_refused(tmp_path: Path) -> None:
    plugin = {"zero_stage": 2, "gradient_clipping": 1.0}
    folder = tmp_path / "checkpoint"
    result(plugin=plugin, save=str(folder))
    other = launch(plugin={**plugin, "zero_stage": 1}, load=str(folder))
    assert other.returncode != 0
    assert "written with ZeRO stage 2, and this run has stage 1" in other.stderr
    fewer = launch(processes=1, plugin=plugin, load=str(folder))
    assert fewer.returncode != 0
    assert "saved by another number of processes" in fewer.stderr

    mark = tmp_path / "ran"
    for manifest in folder.glob("*.json"):
        manifest.unlink()
    (folder / "pytorch_model" / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps(_Payload(str(mark))))
    payload = launch(plugin=plugin, load=str(folder))
    assert payload.returncode != 0
    assert "more than plain data" in payload.stderr
    assert not mark.exists()


class _Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self._path,)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"dummies": True, "plugin": {}}, 'no entry "optimizer"'),
        (
            {"precision": "fp16", "plugin": {"zero_stage": 0}},
            "does not multiply the loss by it" if HAS_FP16 else "does not train in fp16 on devices of the family 'cpu'",
        ),
        ({"plugin": {"zero_stage": 2, **ADAM}}, "describes the optimizer too"),
        (
            {"plugin": {"hf_ds_config": {"zero_optimization": {"stage": 2}, "train_batch_size": 7}}},
            "train_batch_size is 7",
        ),
        (
            {
                "accumulation": 3,
                "plugin": {"hf_ds_config": {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2}},
            },
            "The DeepSpeed configuration has gradient_accumulation_steps=2",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(told: dict[str, Any], said: str) -> None:
    done = launch(processes=1, **told)
    assert done.returncode != 0
    assert said in done.stderr


def test_a_process_without_a_launcher_trains_like_one_of_a_launcher() -> None:
    alone, launched = (reported(launch(processes, plugin={"zero_stage": 1})) for processes in (None, 1))
    assert alone["losses"] == pytest.approx(launched["losses"])
