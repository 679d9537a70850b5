"""Shards of a checkpoint are put together into one file, by function and by command."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch

from accel_bigmodel.weight_files import load_weights
from accel_plugins import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.manifest import FSDP2
from accel_plugins.fsdp.weights import merge_weights
from accel_state.errors import CheckpointError, SettingError
from accel_testing.backends import Case
from accel_testing.processes import Processes

Saved = tuple[Path, dict[str, list[object]]]


def save(folder: str) -> dict[str, list[object]]:
    """Train a little, save in shards, and return the whole weights."""
    session = Case(FSDP2, FullyShardedDataParallelPlugin(2, state_dict_type="SHARDED_STATE_DICT")).open()
    session.train()
    session.save(Path(folder))
    return session.weights()


@pytest.fixture(scope="module")
def saved(two: Processes, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    return folder, two.run(save, str(folder))[0]


@pytest.fixture
def shards(saved: Saved, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged and removed."""
    shutil.copytree(saved[0], tmp_path / "checkpoint")
    return tmp_path / "checkpoint" / "pytorch_model_fsdp_0"


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("by_parent", [True, False])
def test_merged_weights_are_those_of_the_whole_model(
    saved: Saved, shards: Path, tmp_path: Path, safe: bool, by_parent: bool
) -> None:
    target = merge_weights(shards.parent if by_parent else shards, tmp_path / "new" / "out", safe)
    assert target == tmp_path / "new" / "out" / ("model.safetensors" if safe else "pytorch_model.bin")
    assert {name: weight.tolist() for name, weight in load_weights(target).items()} == saved[1]
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert shards.is_dir()


def test_shards_are_removed_once_the_file_is_written(shards: Path, tmp_path: Path) -> None:
    merge_weights(shards.parent, tmp_path / "out", remove_checkpoint_dir=True)
    assert not shards.exists()
    assert shards.parent.is_dir()


def test_a_missing_shard_is_an_error_and_nothing_is_removed(shards: Path, tmp_path: Path) -> None:
    next(shards.glob("__1_*.distcp")).unlink()
    with pytest.raises(CheckpointError, match="damaged or belongs"):
        merge_weights(shards, tmp_path / "out", remove_checkpoint_dir=True)
    assert shards.is_dir()
    assert not (tmp_path / "out").exists()


def test_a_description_that_is_more_than_that_is_refused(shards: Path, tmp_path: Path) -> None:
    (shards / ".metadata").write_bytes(pickle.dumps(torch.nn.Linear))
    with pytest.raises(CheckpointError):
        merge_weights(shards, tmp_path / "out")


def test_a_folder_without_shards_or_with_several_models_is_refused(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="folder does not exist"):
        merge_weights(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(SettingError, match="no shards"):
        merge_weights(tmp_path, tmp_path / "out")
    second = shards.with_name("pytorch_model_fsdp_1")
    second.mkdir()
    (second / ".metadata").write_bytes((shards / ".metadata").read_bytes())
    with pytest.raises(SettingError, match="several models: pytorch_model_fsdp_0, pytorch_model_fsdp_1"):
        merge_weights(shards.parent, tmp_path / "out")


def test_a_file_in_the_way_is_an_error(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine", encoding="utf-8")
    with pytest.raises(CheckpointError, match="The system reported"):
        merge_weights(shards, tmp_path / "out")
    assert (tmp_path / "out").read_text(encoding="utf-8") == "mine"
