from __future__ import annotations

import pytest

from accel_plugins import ProjectConfiguration
from accel_plugins.checkpoint.files import (
    custom_name,
    is_ours,
    loader_name,
    optimizer_name,
    random_states_name,
    scheduler_name,
    weights_name,
)
from accel_state.errors import SettingError


def test_names_are_those_of_the_original_library() -> None:
    assert [optimizer_name(0), optimizer_name(1)] == ["optimizer.bin", "optimizer_1.bin"]
    assert [scheduler_name(0), scheduler_name(2)] == ["scheduler.bin", "scheduler_2.bin"]
    assert [loader_name(0), loader_name(1)] == ["dl_state_dict.bin", "dl_state_dict_1.bin"]
    assert [loader_name(0, 1), loader_name(3, 2)] == ["dl_state_dict_rank1.bin", "dl_state_dict_3_rank2.bin"]
    assert [custom_name(0), random_states_name(3)] == ["custom_checkpoint_0.pkl", "random_states_3.pkl"]
    assert [weights_name(True, 0), weights_name(False, 1)] == ["model.safetensors", "pytorch_model_1.bin"]


OURS = (
    *("model.safetensors", "model_1.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"),
    *("pytorch_model.bin.index.json", "optimizer.bin", "optimizer_3.bin", "optimizer_0", "optimizer_0_rank1.bin"),
    *("scheduler_1.bin", "sampler.bin", "dl_state_dict_1_rank2.bin", "scaler.pt", "random_states_12.pkl"),
    *("custom_checkpoint_0.pkl", "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin", "pytorch_model_fsdp_0_rank3.bin"),
    "checkpoint_manifest.json",
)


@pytest.mark.parametrize("name", OURS)
def test_names_that_saving_writes_are_known(name: str) -> None:
    assert is_ours(name)


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "model.onnx", "optimizer.bin.bak", "logs"])
def test_other_names_are_the_users(name: str) -> None:
    assert not is_ours(name)


def test_a_project_has_the_surface_of_the_original_and_both_spellings() -> None:
    project = ProjectConfiguration("here", None, True, 3, 5, True)
    other = ProjectConfiguration(iteration_checkpoints=True)

    assert (project.project_dir, project.logging_dir, project.total_limit, project.iteration) == ("here", "here", 3, 5)
    assert project.automatic_checkpoint_naming
    assert project.save_on_each_node
    assert other.automatic_checkpoint_naming
    assert (other.project_dir, other.logging_dir) == (None, None)
    other.set_directories("there")
    assert (other.project_dir, other.logging_dir) == ("there", "there")
    assert ProjectConfiguration("a", "b").logging_dir == "b"


@pytest.mark.parametrize(
    ("field", "value"), [("total_limit", -1), ("iteration", -1), ("verify", "nothing"), ("deadline", 0.0)]
)
def test_numbers_that_make_no_sense_are_refused(field: str, value: object) -> None:
    with pytest.raises(SettingError, match=field):
        ProjectConfiguration(**{field: value})  # type: ignore[arg-type]
