"""The Trainer of transformers trains on this library as it does on the original, without a line changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accel_state.settings.installed import importable

pytestmark = [
    pytest.mark.skipif(not importable("transformers"), reason="needs transformers: nox -s clients-transformers"),
    pytest.mark.timeout(900),
]

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3, "max_steps": 4},
    "accumulation over the end of an epoch": {"gradient_accumulation_steps": 5, "num_train_epochs": 2, "max_steps": -1},
    "bf16": {"bf16": True},
    "clipped, with warmup and a cosine": {"max_grad_norm": 0.5, "warmup_steps": 2, "lr_scheduler_type": "cosine"},
    "evaluated and saved on the way": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
    },
    "batches of several lengths by loading processes": {"dataloader_num_workers": 2, "dataloader_drop_last": True},
    "batches divided": {"accelerator_config": {"split_batches": True, "even_batches": True}},
    "batches read by the main process": {"accelerator_config": {"dispatch_batches": True}},
    "checkpointed activations": {"gradient_checkpointing": True},
}


def agree(both: Any, tolerance: float = 1e-4) -> None:
    ours, original = both
    assert ours["evaluated"] == pytest.approx(original["evaluated"], rel=tolerance)
    agree_in_training(both, tolerance)


def agree_in_training(both: Any, tolerance: float = 1e-4) -> None:
    ours, original = both
    for name in ("losses", "norms", "rates"):
        assert ours[name] == pytest.approx(original[name], rel=tolerance, abs=tolerance), name
    for name in ("steps", "processes", "kind", "files"):
        assert ours[name] == original[name], name


@pytest.mark.parametrize("case", CASES)
def test_on_one_process(case: str, compare: Any) -> None:
    both = compare("trainer.py", arguments=CASES[case])
    assert len(both.ours["losses"]) == both.ours["steps"]
    agree(both, 1e-2 if case == "bf16" else 1e-4)


@pytest.mark.parametrize("case", list(CASES)[2:-1])
def test_on_two_processes(case: str, compare: Any) -> None:
    uneven = case in ("batches divided", "batches read by the main process")
    both = compare("trainer.py", "torchrun", arguments=CASES[case], whole=uneven)
    assert both.ours["processes"] == 2
    if not uneven:
        agree(both, 1e-2 if case == "bf16" else 1e-4)
        return
    # The Trainer repeats the loss of a short last batch for more samples than it has. The original keeps those of the
    # first process, or half of each.
    agree_in_training(both)
    assert both.ours["evaluated"] == pytest.approx(both.ours["exact"], rel=1e-3)
    assert both.original["evaluated"] == pytest.approx(both.ours["exact"], rel=1e-2)


def test_launched_by_the_commands_of_this_library(run: Any, tmp_path: Path) -> None:
    runs = [
        run("trainer.py", launcher, folder=str(tmp_path / launcher), arguments={})
        for launcher in ("torchrun", "accel", "accelerate")
    ]
    assert runs[0]["processes"] == 2
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_resumed_in_the_middle(launcher: str, compare: Any) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    told = {"arguments": arguments, "model": {"resid_pdrop": 0.1}}
    whole = compare("trainer.py", launcher, **told)
    agree(whole)
    resumed = compare("trainer.py", launcher, resume="{folder}/checkpoint-2", **told)
    agree(resumed)
    assert resumed.ours == whole.ours


SHARDED: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}
DIVIDED_STATES = {
    "deepspeed": {
        "zero_optimization": {"stage": 2},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }
}
SHARDED_BY_VERSION_1 = {**SHARDED, "fsdp_config": {**SHARDED["fsdp_config"], "version": 1}}
ENGINES = [
    pytest.param(SHARDED_BY_VERSION_1, "FSDP", id="fsdp1"),
    pytest.param(SHARDED, "FSDP", id="fsdp2"),
    pytest.param(
        DIVIDED_STATES,
        "DEEPSPEED",
        id="zero2",
        marks=pytest.mark.skipif(not importable("deepspeed"), reason="needs deepspeed: nox -s clients-transformers"),
    ),
]


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=str)
@pytest.mark.parametrize(("engine", "kind"), ENGINES)
def test_engines_that_the_original_does_not_run_on_a_cpu(
    engine: dict[str, Any], kind: str, more: dict[str, Any], run: Any, tmp_path: Path
) -> None:
    arguments = {"train_sampling_strategy": "sequential", "max_steps": 5, **engine, **more}
    ours = run("trainer.py", "torchrun", folder=str(tmp_path), arguments=arguments)
    accumulation = more.get("gradient_accumulation_steps", 1)
    plain = run("plain_loop.py", batch=8, steps=5, accumulation=accumulation, bf16=more.get("bf16", False))
    tolerance = 2e-2 if "bf16" in more else 1e-3
    assert (ours["kind"], ours["processes"]) == (kind, 2)
    assert ours["losses"] == pytest.approx(plain["losses"], rel=tolerance)
    # In the last batch, the mean that stands for each of its samples has some that were added for evenness.
    assert ours["evaluated"] == pytest.approx(plain["evaluated"], rel=2e-2)
    assert "final/model.safetensors" in ours["files"]


@pytest.mark.parametrize(("engine", "kind"), ENGINES)
def test_engines_go_on_from_a_checkpoint(engine: dict[str, Any], kind: str, run: Any, tmp_path: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, **engine}
    told = {"folder": str(tmp_path), "arguments": arguments}
    whole = run("trainer.py", "torchrun", **told)
    resumed = run("trainer.py", "torchrun", resume=str(tmp_path / "checkpoint-2"), **told)
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert resumed["kind"] == kind


def test_a_stream_without_a_length_is_evaluated_as_with_the_original(compare: Any) -> None:
    ours, original = compare("trainer_stream.py", lengths=[64, 66, 67])
    assert ours["losses"] == pytest.approx(original["losses"], rel=1e-5)
    assert ours["losses"] == pytest.approx(ours["exact"], rel=1e-5)
    assert ours["predictions"] == original["predictions"] == [64, 66, 67]


def test_each_sample_of_a_stream_counts_once_on_two_processes(compare: Any) -> None:
    """The original counts the short last step of the first process twice: it is 0.27 off with 66 samples."""
    ours, original = compare("trainer_stream.py", "torchrun", lengths=[64, 66])
    assert ours["losses"] == pytest.approx(ours["exact"], rel=1e-5)
    assert original["losses"][0] == pytest.approx(ours["losses"][0], rel=1e-5)
    assert ours["predictions"] == original["predictions"] == [64, 66]
