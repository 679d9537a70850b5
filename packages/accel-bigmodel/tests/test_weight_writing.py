from __future__ import annotations

import json
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from accel_bigmodel.offload import read_offload_index, save_offload_index
from accel_bigmodel.weight_files import (
    load_weights,
    load_weights_file,
    save_weights,
    save_weights_file,
    split_state_dict,
    stored_names,
    tied_names,
)
from accel_state.errors import CheckpointError, SettingError


def weights() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.arange(12.0).reshape(3, 4),
        "a.bias": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "mask": torch.tensor([True, False]),
        "step": torch.tensor(7),
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["10GB", "20KiB", 16])
@pytest.mark.parametrize("fsync", [True, False])
def test_what_is_saved_is_loaded(tmp_path: Path, safe: bool, size: int | str, fsync: bool) -> None:
    shards = save_weights(weights(), tmp_path / "new" / "folder", size, safe, fsync=fsync)
    assert same(load_weights(tmp_path / "new" / "folder"), weights())
    written = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert written == {
        *shards.files,
        *([] if shards.index is None else [f"{'model.safetensors' if safe else 'pytorch_model.bin'}.index.json"]),
    }


@pytest.mark.parametrize(("name", "logged"), [("a.safetensors", 1), ("a.bin", 0)])
def test_a_log_names_tied_weights_that_a_file_does_not_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, logged: int
) -> None:
    tied = torch.ones(2)
    save_weights_file({"a": tied, "b": tied, "c": torch.ones(2)}, tmp_path / name)
    assert caplog.text.count("Removed shared tensor names") == caplog.text.count("{'b': 'a'}") == logged


def test_shards_hold_at_most_the_limit_unless_one_weight_is_larger() -> None:
    state = {
        "a": torch.zeros(10),
        "b": torch.zeros(10),
        "c": torch.zeros(100),
        "d": torch.zeros(5),
        "e": torch.zeros(15),
    }
    files = split_state_dict(state, 80).files
    assert list(files.values()) == [("a", "b"), ("c",), ("d", "e")]
    assert next(iter(files)) == "model-00001-of-00003.safetensors"


def test_the_index_is_sorted_indented_and_counts_bytes(tmp_path: Path) -> None:
    save_weights({"b": torch.zeros(4), "a": torch.zeros(4)}, tmp_path, 16)
    text = (tmp_path / "model.safetensors.index.json").read_text()
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    assert json.loads(text) == {
        "metadata": {"total_size": 32},
        "weight_map": {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"},
    }


def test_an_empty_state_dict_gives_one_empty_file(tmp_path: Path) -> None:
    save_weights({}, tmp_path)
    assert load_weights(tmp_path / "model.safetensors") == {}


def test_tied_weights_are_found_by_memory_not_by_value() -> None:
    tensor, storage = torch.zeros(3), torch.zeros(6)
    state = {"a": tensor, "b": tensor.clone(), "c": tensor.view(3), "left": storage[:3], "right": storage[3:]}
    empty = {"e": torch.zeros(0), "f": torch.zeros(0)}
    meta = {"m": torch.zeros(3, device="meta"), "n": torch.zeros(3, device="meta")}
    assert tied_names({**state, **empty, **meta}) == [["a", "c"]]


@pytest.mark.parametrize("size", ["10GB", 16])
def test_tied_weights_keep_their_first_name_in_safetensors(tmp_path: Path, size: int | str) -> None:
    tensor = torch.ones(4)
    state = {"embed": tensor, "middle": torch.zeros(4), "head": tensor}
    save_weights(state, tmp_path, size)
    assert load_weights(tmp_path).keys() == {"embed", "middle"}
    assert stored_names(state) == ["embed", "middle"]
    assert split_state_dict(state, size).total_size == 32


def test_tied_weights_keep_all_names_and_stay_tied_in_torch_format(tmp_path: Path) -> None:
    tensor = torch.ones(4)
    save_weights({"embed": tensor, "middle": torch.zeros(4), "head": tensor}, tmp_path, 16, safe_serialization=False)
    loaded = load_weights(tmp_path)
    assert loaded["embed"].data_ptr() == loaded["head"].data_ptr()


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_views_of_one_storage_are_saved_whole_and_alone(tmp_path: Path, name: str) -> None:
    storage = torch.arange(1000.0)
    square = torch.arange(4.0).reshape(2, 2)
    state = {
        "head": storage[:2],
        "tail": storage[998:],
        "square": square,
        "transposed": square.t(),
        "bits": square.view(torch.int32),
    }
    save_weights_file(state, tmp_path / name)
    assert same(load_weights_file(tmp_path / name), state)
    assert (tmp_path / name).stat().st_size < 3000


def test_metadata_name_the_format(tmp_path: Path) -> None:
    save_weights(weights(), tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_parameters_that_need_gradients_are_saved(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    for name in ("m.safetensors", "m.bin"):
        save_weights_file(dict(layer.named_parameters()), tmp_path / name)
        loaded = load_weights_file(tmp_path / name)
        assert torch.equal(loaded["weight"], layer.weight)
        assert not loaded["weight"].requires_grad


@pytest.mark.parametrize(("first", "second"), [(16, "10GB"), ("10GB", 16), (16, 32)])
def test_a_save_replaces_the_one_before_and_nothing_else(tmp_path: Path, first: int | str, second: int | str) -> None:
    (tmp_path / "other-00001-of-00002.safetensors").write_text("not ours")
    save_weights({"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(4)}, tmp_path, first)
    new = {"a": torch.ones(4), "b": torch.ones(4)}
    shards = save_weights(new, tmp_path, second)
    assert same(load_weights(tmp_path), new)
    index = set() if shards.index is None else {"model.safetensors.index.json"}
    assert {path.name for path in tmp_path.iterdir()} == {*shards.files, *index, "other-00001-of-00002.safetensors"}


@pytest.mark.parametrize("safe", [True, False])
def test_a_weight_without_data_is_refused_before_anything_is_written(tmp_path: Path, safe: bool) -> None:
    state = {"a": torch.zeros(2), "lost": torch.zeros(3, 5, device="meta")}
    with pytest.raises(CheckpointError, match=r"'lost' of shape \(3, 5\) is on the meta device"):
        save_weights(state, tmp_path / "new", safe_serialization=safe)
    assert not (tmp_path / "new").exists()


def test_what_is_no_tensor_has_no_place_in_safetensors(tmp_path: Path) -> None:
    state = {"a": torch.zeros(2), "a._extra_state": {"calls": 3}}
    with pytest.raises(CheckpointError, match=r"'a\._extra_state' is a dict"):
        save_weights(state, tmp_path)
    save_weights(state, tmp_path, safe_serialization=False)
    assert load_weights(tmp_path)["a._extra_state"] == {"calls": 3}


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(CheckpointError, match="cannot be created"):
        save_weights(weights(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_sparse_weights_are_written_by_torch_only(tmp_path: Path) -> None:
    state = {"sparse": torch.eye(2).to_sparse()}
    with pytest.raises(CheckpointError, match=r"'sparse' is a torch\.sparse_coo tensor"):
        save_weights_file(state, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []
    save_weights_file(state, tmp_path / "model.bin")
    with torch.sparse.check_sparse_tensor_invariants():
        assert torch.equal(load_weights_file(tmp_path / "model.bin")["sparse"].to_dense(), torch.eye(2))


@pytest.mark.parametrize("name", ["model.bin", "model.safetensors"])
def test_a_full_disk_is_a_typed_error_and_keeps_the_old_file(tmp_path: Path, name: str) -> None:
    resource = pytest.importorskip("resource")
    save_weights_file(weights(), tmp_path / name)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match=rf"{name}' \(7\.81 KiB\)"):
            save_weights_file({"a": torch.zeros(2000)}, tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert same(load_weights_file(tmp_path / name), weights())
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_size_that_is_no_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError):
        save_weights(weights(), tmp_path, "many")


def test_splitting_is_linear_in_the_number_of_names() -> None:
    compared = 0

    class Counted(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    shared = torch.zeros(1)
    state = {Counted(f"w{i}"): shared if i % 2 else torch.zeros(1) for i in range(4000)}
    compared = 0
    split_state_dict(state, 4)
    assert compared < 10 * len(state)


def write_weights(folder: Path, value: int) -> None:
    save_weights_file({"a": torch.full((50_000,), float(value))}, folder / "model.safetensors")


def write_index(folder: Path, value: int) -> None:
    save_offload_index({"a": {"dtype": "float32", "shape": [value]}}, folder)


@pytest.mark.parametrize("write", [write_weights, write_index])
def test_writers_with_one_pid_do_not_meet_in_one_temporary_file(
    tmp_path: Path, write: Callable[[Path, int], None]
) -> None:
    """Threads have one pid, as the processes of two containers may."""
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda value: write(tmp_path, value), range(1, 81)))
    (file,) = tmp_path.iterdir()
    if write is write_weights:
        assert load_weights_file(file)["a"].unique().numel() == 1
    else:
        assert read_offload_index(tmp_path)["a"]["shape"][0] in range(1, 81)
