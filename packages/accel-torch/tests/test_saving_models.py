"""Weights of one model and single objects in files, and what is written where."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_bigmodel import disk_offload
from accel_bigmodel.weight_files import load_weights
from accel_plugins.checkpoint.pickled import load, save
from accel_state.errors import CheckpointError, SettingError, UnknownKind
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import Accelerator, ProjectConfiguration
from accel_torch.folders import follow_number


@pytest.fixture
def accelerator(fresh_state: None) -> Accelerator:
    return Accelerator(cpu=True)


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", ["10GB", "1KB", 600])
def test_a_model_is_written_in_one_file_or_in_shards_with_an_index(
    tmp_path: Path, accelerator: Accelerator, safe: bool, limit: int | str
) -> None:
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, tmp_path, max_shard_size=limit, safe_serialization=safe)
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    names = {entry.name for entry in tmp_path.iterdir()}

    if limit == "10GB":
        assert names == {f"{stem}.{suffix}"}
    else:
        index = json.loads((tmp_path / f"{stem}.{suffix}.index.json").read_text())
        assert names == {*index["weight_map"].values(), f"{stem}.{suffix}.index.json"}
        assert f"{stem}-00001-of-0000{len(names) - 1}.{suffix}" in names
    weights = load_weights(tmp_path)
    assert ("second.weight" in weights) is not safe
    assert torch.equal(weights["first.weight"], model.first.weight)


def test_a_smaller_save_removes_the_shards_of_a_larger_one_and_nothing_else(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = accelerator.prepare(nn.Linear(32, 32))
    accelerator.save_model(model, tmp_path, max_shard_size=200)
    assert len(list(tmp_path.iterdir())) == 4
    accelerator.save_model(model, tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_a_model_without_data_or_a_file_in_place_of_the_folder_is_refused(
    tmp_path: Path, accelerator: Accelerator
) -> None:
    with pytest.raises(CheckpointError, match="meta device"):
        accelerator.save_model(nn.Linear(2, 2, device="meta"), tmp_path / "a")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="cannot be created"):
        accelerator.save_model(nn.Linear(2, 2), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_offloaded_weights_are_written_too(tmp_path: Path, accelerator: Accelerator) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    disk_offload(model, str(tmp_path / "offload"), torch.device("cpu"))
    accelerator.save_model(model, tmp_path / "saved")
    written = load_file(tmp_path / "saved" / "model.safetensors")

    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], value) for name, value in expected.items())


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.bin"])
def test_an_object_is_saved_safely_under_any_name(tmp_path: Path, accelerator: Accelerator, name: str) -> None:
    shared = torch.arange(4.0)
    accelerator.save({"a": shared, "b": shared}, tmp_path / name, safe_serialization=True)

    assert load_file(tmp_path / name)["a"].tolist() == [0, 1, 2, 3]
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_an_object_comes_back_and_code_does_not(tmp_path: Path, accelerator: Accelerator) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/ran",)

    accelerator.save({"numbers": [1, 2], "tensor": torch.ones(2)}, tmp_path / "plain.bin")
    assert load(tmp_path / "plain.bin")["numbers"] == [1, 2]
    with (tmp_path / "plain.bin").open("rb") as file:
        assert load(file, "cpu")["tensor"].tolist() == [1, 1]
    torch.save(Evil(), tmp_path / "evil.bin")
    with pytest.raises(CheckpointError, match="more than plain data"):
        load(tmp_path / "evil.bin")
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path: Path, accelerator: Accelerator) -> None:
    accelerator.save({"a": 1}, tmp_path / "a.bin")
    with pytest.raises(CheckpointError):
        accelerator.save({"a": lambda: None}, tmp_path / "a.bin")
    with pytest.raises(UnknownKind, match="mapping of names"):
        accelerator.save([1], tmp_path / "a.bin", safe_serialization=True)
    assert load(tmp_path / "a.bin") == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.bin"]


def test_objects_saved_at_once_do_not_meet_in_one_temporary_file(tmp_path: Path, accelerator: Accelerator) -> None:
    """Threads have one pid, as the processes of two containers may."""
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda value: accelerator.save([value] * 10_000, tmp_path / "a.bin"), range(80)))
    assert len(set(load(tmp_path / "a.bin"))) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.bin"]


def test_options_that_no_backend_knows_are_refused(tmp_path: Path, accelerator: Accelerator) -> None:
    with pytest.raises(SettingError, match="exclude_frozen_parameters"):
        accelerator.save_state(str(tmp_path / "a"), exclude_frozen_parameters=True)
    with pytest.raises(UnknownKind, match="map_location"):
        accelerator.load_state(str(tmp_path), load_kwargs={"map_location": "tpu"}, missing_ok=False)


def test_automatic_checkpoints_go_on_after_the_newest(tmp_path: Path) -> None:
    def run(saves: int) -> tuple[str | None, list[str]]:
        with fresh():
            project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, fsync=False)
            accelerator = Accelerator(cpu=True, project_config=project)
            accelerator.prepare(nn.Linear(2, 1))
            loaded = accelerator.load_state(missing_ok=True)
            return loaded, [Path(accelerator.save_state()).name for _ in range(saves)]

    assert run(2) == (None, ["checkpoint_0", "checkpoint_1"])
    newest = tmp_path / "checkpoints" / "checkpoint_1"
    assert run(1) == (str(newest), ["checkpoint_2"])
    (tmp_path / "checkpoints" / "checkpoint_2" / "model.safetensors").unlink()
    assert run(1) == (str(newest), ["checkpoint_3"])


def test_a_run_that_loads_nothing_does_not_number_before_another(tmp_path: Path) -> None:
    def begin(**options: int) -> Accelerator:
        project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, fsync=False, **options)
        accelerator = Accelerator(cpu=True, project_config=project)
        accelerator.prepare(nn.Linear(2, 1))
        return accelerator

    folder = tmp_path / "checkpoints"
    with fresh():
        accelerator = begin(total_limit=2)
        for _ in range(4):
            accelerator.save_state()
    with fresh():
        with pytest.raises(CheckpointError, match="checkpoint_3 exists already"):
            begin(total_limit=2).save_state()
        assert {entry.name for entry in folder.iterdir()} == {"checkpoint_2", "checkpoint_3"}
    with fresh():
        accelerator = begin(total_limit=2)
        accelerator.load_state(str(folder / "checkpoint_3"))
        accelerator.save_state()
        assert {entry.name for entry in folder.iterdir()} == {"checkpoint_3", "checkpoint_4"}


@pytest.mark.parametrize(
    ("loaded", "following"),
    [
        ("s3://bucket/run/checkpoint_7", 8),
        ("s3://bucket/run/checkpoint_7/", 8),
        ("s3://bucket/other/checkpoint_7", 2),
        ("s3://bucket/run/best", 2),
        ("run/checkpoints/checkpoint_7", 8),
        ("run/checkpoints/checkpoint_0", 2),
        ("run/checkpoint_7", 2),
    ],
)
def test_names_go_on_after_that_of_a_checkpoint_that_was_loaded(loaded: str, following: int) -> None:
    project = ProjectConfiguration("run", automatic_checkpoint_naming=True, iteration=2, remote="s3://bucket/run")
    follow_number(project, loaded)
    assert project.iteration == following


def save_on_two(folder: str, on_each_node: bool) -> None:
    project = ProjectConfiguration(save_on_each_node=on_each_node, fsync=False)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = accelerator.prepare(nn.Linear(2, 2))
    own = Path(folder, str(accelerator.process_index))
    accelerator.save_model(model, own)
    accelerator.save({"rank": accelerator.process_index}, own / "object.bin")
    save({"rank": accelerator.process_index}, own / "other.bin")
    accelerator.wait_for_everyone()


@pytest.mark.parametrize("on_each_node", [False, True])
def test_only_those_that_write_files_write(two: Processes, tmp_path: Path, on_each_node: bool) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    two.run(save_on_two, str(tmp_path), on_each_node)

    assert load(tmp_path / "0" / "object.bin") == {"rank": 0}
    assert {entry.name for entry in (tmp_path / "0").iterdir()} == {"model.safetensors", "object.bin", "other.bin"}
    assert list((tmp_path / "1").iterdir()) == []
