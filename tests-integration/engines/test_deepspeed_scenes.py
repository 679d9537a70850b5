"""DeepSpeed for real, on two processes: several engines, checkpoints and their options, weights, experts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel_state.settings.installed import importable
from accel_testing.processes import run_command

pytestmark = [
    pytest.mark.skipif(not importable("deepspeed"), reason="needs deepspeed: nox -s engines-deepspeed"),
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("preloaded_python"),
]
PRELOADED = ("deepspeed", "accel_torch.accelerator")

SCENES = "deepspeed_scenes.py"
NAMES = ["0.bias", "0.weight", "3.bias", "3.weight"]
Play = Callable[..., Any]


def test_several_engines_train_as_their_models_would_alone(play: Play) -> None:
    done, expected = play(SCENES, "several_models"), play(SCENES, "several_models", plain=True)
    assert done["types"] == ["DeepSpeedEngine"] * 3
    assert done["selected"] == [["student"], ["teacher"]]
    assert done["stage of the teacher"] == 3
    for mine, others in zip(done["losses"], expected["losses"], strict=True):
        assert mine == pytest.approx(others, abs=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_exact_epochs_train_as_one_process_with_all_samples(play: Play, stage: int) -> None:
    done = play(SCENES, "exact_epochs", stage=stage)
    assert done["samples"] == [list(range(13)), [0], [*range(5), *range(100, 109)], [100, 101, 102]]
    assert done["steps"] == [4, 1, 5, 2]
    # Process 0 has no data in the last two steps of the first stream, and none of the second at all; process 1 has
    # none in the last step of each map-style data set.
    assert done["stand-ins"] == [4, 2]
    assert done["off"] < 1e-5
    assert "weights the batches of a step itself" in done["refusal"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_guard_raises_on_all_processes_before_weights_change(play: Play, stage: int) -> None:
    done = play(SCENES, "guarded", stage=stage)
    for error, is_unchanged, step, ranks, action, good in done["everyones"]:
        assert error.startswith("Cannot make step 3.")
        assert is_unchanged
        assert (step, ranks, action, good) == (3, [1], "raise", 2)
    assert ["raise" in refusal for refusal in done["refusals"]] == [True, True]


def test_accelerators_of_one_run_accumulate_alike(play: Play) -> None:
    done, expected = play(SCENES, "shared_accumulation"), play(SCENES, "shared_accumulation", plain=True)
    for mine, others in zip(done["losses"], expected["losses"], strict=True):
        assert mine == pytest.approx(others, abs=1e-4)
    assert done["refusal"].startswith("Conflict")
    assert "num_steps=3" in done["refusal"]


def test_clipping_that_an_engine_does_not_do_is_refused(play: Play) -> None:
    done = play(SCENES, "other_clipping")
    assert len(done["norms"]) == 3
    assert done["norms"][0] > 0
    assert done["norms"][2] == pytest.approx(1e-3, rel=1e-3)  # a model beside the engine is really clipped
    smaller, other_norm, nothing = done["refusals"]
    assert "max_norm=0.25" in smaller
    assert "clips to 0.5 in the 2-norm" in smaller
    assert "norm_type=1" in other_norm
    assert "configured without clipping" in nothing
    assert "Set DeepSpeedPlugin(gradient_clipping=1.0)" in nothing


@pytest.mark.skipif(not importable("torchao"), reason="needs torchao: nox -s engines-deepspeed")
@pytest.mark.parametrize("stage", [1, 3])
def test_layers_compute_in_8_bits(play: Play, stage: int) -> None:
    done, expected = play(SCENES, "in_8_bits", stage=stage), play(SCENES, "in_8_bits", plain=True)
    assert done["layers"] == expected["layers"] == ["Linear", "ReLU", "Dropout", "Float8Linear", "Linear"]
    assert done["losses"] == pytest.approx(expected["losses"], abs=0.05)


@pytest.mark.skipif(not Path("/usr/include/libaio.h").exists(), reason="needs libaio: apt-get install libaio-dev")
def test_states_kept_on_a_disk_train_alike(play: Play, tmp_path: Path) -> None:
    done = play(SCENES, "on_disk", folder=str(tmp_path))
    assert done["losses"] == pytest.approx(play(SCENES, "in_memory"), abs=1e-4)
    assert done["bytes"] >= 3 * 4 * 1024**2  # weights and both moments of the widest layer


def test_checkpoints_take_deepspeeds_own_options(play: Play, tmp_path: Path) -> None:
    done = play(SCENES, "options_of_checkpoints", folder=str(tmp_path / "state"))
    assert done["weights"] == sorted({*NAMES} - {"0.weight"})  # the one that is frozen is left out
    assert done["seen"] == 8
    assert done["rates"] == [0.01, 0.5]  # the second time the optimizer kept its own
    saving, loading, behind = done["refusals"]
    assert "Use only its options: client_state, exclude_frozen_parameters" in saving
    assert "DeepSpeed has strict, " in loading
    assert behind.startswith("NotOffered")


def test_a_checkpoint_of_another_stage_is_refused(play: Play, tmp_path: Path) -> None:
    said = play(SCENES, "other_stages", folder=str(tmp_path))
    assert len(said) == 12
    for pair, text in said.items():
        theirs, ours = pair.split(" -> ")
        assert text.startswith("CheckpointError: "), pair
        assert f"written with ZeRO stage {theirs}, and this run has stage {ours}" in text
        assert f"Use zero_stage={theirs}" in text


@pytest.mark.parametrize("stage", [2, 3])
def test_an_epoch_goes_on_in_its_middle(play: Play, tmp_path: Path, stage: int) -> None:
    done = play(SCENES, "middle_of_an_epoch", folder=str(tmp_path / "state"), stage=stage)
    assert len(done["whole"]) == 8
    assert done["again"] == [done["whole"][3:]] * 2


def test_weights_in_16_and_in_32_bits(play: Play, tmp_path: Path) -> None:
    done = play(SCENES, "weights", folder=str(tmp_path))
    assert done["divided"] == [0, 0, 0, 0]
    assert done["changed"] == [2.0]
    assert done["fp32"] == dict.fromkeys(NAMES, "torch.float32")
    assert done["fp32 equal"]
    assert done["bf16 equal"]
    assert done["refusal"].startswith("NotReady")
    assert "zero3_save_16bit_model=True" in done["refusal"]


def test_every_stage_saves_the_files_of_one_process(play: Play, tmp_path: Path) -> None:
    assert play(SCENES, "saved_models", folder=str(tmp_path)) == [0] * 5

    written = {
        stage.name: {str(path.relative_to(stage)): path.read_bytes() for path in sorted(stage.rglob("*.*"))}
        for stage in tmp_path.iterdir()
    }
    expected = written.pop("None")
    assert written == dict.fromkeys("0123", expected)
    header = expected["10GB/model.safetensors"]
    assert b'"format":"pt"' in header
    assert (b'"0.weight"' in header, b'"2.weight"' in header) == (True, False)
    assert len(expected) > 3


def test_a_universal_checkpoint_is_read_by_other_processes_in_another_stage(play: Play, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    losses = play(SCENES, "universal", folder=folder)
    with pytest.raises(AssertionError, match="ds_to_universal --inject_missing_state --input_folder"):
        play(SCENES, "universal", processes=1, folder=folder, load=True)
    place = os.path.join(folder, "pytorch_model")
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    done = run_command([*convert, "--input_folder", place, "--output_folder", f"{place}_universal"], timeout=200)
    assert done.returncode == 0, done.stderr
    alone = play(SCENES, "universal", processes=1, folder=folder, load=True)
    # Two processes read two batches at once; the mean over both is what one process sees one after the other.
    assert alone[0] == pytest.approx(losses[0], abs=0.2)
    assert len(alone) == 2 * len(losses)


def test_a_schedule_is_made_for_deepspeeds_optimizer(play: Play) -> None:
    done = play(SCENES, "own_schedule")
    assert done["rates"] == [0.5, 0.25, 0.125]
    assert done["optimizer"] == "DeepSpeedZeroOptimizer"


def test_a_mixture_of_experts_is_taken_whole(play: Play) -> None:
    done = play(SCENES, "experts")
    assert done["pieces"] == ["Experts"]
    assert done["losses"][-1] < done["losses"][0]
    assert done["refusal"].startswith("SettingError")
    assert "no layer of the class Specialists" in done["refusal"]


def test_the_table_says_how_a_run_computes(play: Play) -> None:
    done = play(SCENES, "told_by_the_table")
    assert done["precision"] == "bf16"
    assert done["dtypes"] == ["torch.bfloat16"]
    assert [type(norm) for norm in done["norms"]] == [type(None), float]
    assert done["batch"] == 4 * 2 * 2
    assert done["first engine"]
    assert done["environment"] == "true"
    schedule, second = done["refusals"]
    assert schedule.startswith("Conflict: Cannot prepare LambdaLR together with a DummyOptim")
    assert second.startswith("NotOffered: Cannot use deepspeed_plugin=")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_of_an_engine_is_given_back(play: Play, stage: int) -> None:
    done = play(SCENES, "freed", stage=stage)
    before, training, after = done["bytes"]
    assert training - before > 4 * 1_100_000
    assert after - before < 400_000
    assert len(done["losses"]) == 2  # another model trains afterwards


@pytest.mark.parametrize("named", ["auto", 0])
def test_a_warm_up_of_no_steps_ends_with_the_first(play: Play, named: int | str) -> None:
    assert play(SCENES, "default_warm_up", named=named)["rates"] == [0.25, 0.5]
