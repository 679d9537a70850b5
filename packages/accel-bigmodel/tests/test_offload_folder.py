from __future__ import annotations

import contextlib
import gc
import json
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    OffloadedWeightsLoader,
    PrefixedDataset,
    add_hook_to_module,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
    save_weights,
)
from accel_bigmodel.offload import read_offload_index
from accel_state.errors import CheckpointError, SettingError

WEIGHTS = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "a.half": torch.arange(4, dtype=torch.bfloat16),
    "a.small": torch.ones(3).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(7),
    "mask": torch.tensor([True, False]),
    "empty": torch.zeros(0, 4),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
}


def test_weights_are_written_raw_and_mapped_again(tmp_path: Path) -> None:
    offload_state_dict(tmp_path / "new", WEIGHTS)
    loader = OffloadedWeightsLoader(save_folder=tmp_path / "new")
    assert list(loader) == list(WEIGHTS)
    assert len(loader) == len(WEIGHTS)
    for name, weight in WEIGHTS.items():
        assert loader[name].dtype == weight.dtype
        assert loader[name].shape == weight.shape
        assert loader[name].float().tolist() == weight.float().tolist()
        assert loader[name] is loader[name]
    index = json.loads((tmp_path / "new" / "index.json").read_text())
    assert index["scalar"] == {"dtype": "int64", "shape": []}
    assert (tmp_path / "new" / "a.half.dat").read_bytes() == WEIGHTS["a.half"].view(torch.int16).numpy().tobytes()


FOLDER = {
    "w": (torch.arange(6.0).reshape(2, 3).t(), "00000000000040400000803f00008040000000400000a040"),
    "half": (torch.tensor([1.0, -2.0], dtype=torch.bfloat16), "803f00c0"),
    "f16": (torch.tensor([0.5], dtype=torch.float16), "0038"),
    "step": (torch.tensor(7), "0700000000000000"),
    "mask": (torch.tensor([True, False]), "0100"),
    "none": (torch.zeros(0, 3), "00"),
}
"""Weights and the bytes in which other libraries keep them in such a folder."""


def test_a_folder_has_the_bytes_that_other_libraries_expect(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {name: weight for name, (weight, _) in FOLDER.items()})
    for name, (_, content) in FOLDER.items():
        assert (tmp_path / f"{name}.dat").read_bytes().hex() == content
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["w"] == {"dtype": "float32", "shape": [3, 2]}
    assert index["half"]["dtype"] == "bfloat16"


def test_a_folder_of_another_library_is_read(tmp_path: Path) -> None:
    index = {}
    for name, (weight, content) in FOLDER.items():
        (tmp_path / f"{name}.dat").write_bytes(bytes.fromhex(content))
        index[name] = {"dtype": str(weight.dtype).removeprefix("torch."), "shape": list(weight.shape)}
    (tmp_path / "index.json").write_text(json.dumps(index, indent=2))
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert all(torch.equal(loader[name], weight) for name, (weight, _) in FOLDER.items())


def test_what_is_written_to_a_mapped_weight_stays_in_memory(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"w": torch.zeros(4)})
    OffloadedWeightsLoader(save_folder=tmp_path)["w"].add_(1)
    assert OffloadedWeightsLoader(save_folder=tmp_path)["w"].tolist() == [0, 0, 0, 0]


def test_a_mapped_weight_keeps_its_values_when_its_file_is_written_again(tmp_path: Path) -> None:
    values = torch.arange(100_000.0)
    offload_state_dict(tmp_path, {"w": values})
    mapped = OffloadedWeightsLoader(save_folder=tmp_path)["w"]
    offload_state_dict(tmp_path, {"w": mapped})
    assert torch.equal(OffloadedWeightsLoader(save_folder=tmp_path)["w"], values)
    offload_state_dict(tmp_path, {"w": torch.zeros(10)})
    assert torch.equal(mapped, values)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "w.dat"]


def test_the_index_is_merged_and_an_empty_one_is_not_written(tmp_path: Path) -> None:
    save_offload_index({}, tmp_path)
    assert list(tmp_path.iterdir()) == []
    offload_state_dict(tmp_path, {"a": torch.zeros(1)})
    offload_state_dict(tmp_path, {"b": torch.zeros(1)})
    assert read_offload_index(tmp_path).keys() == {"a", "b"}
    text = (tmp_path / "index.json").read_text()
    assert text == json.dumps(json.loads(text), indent=2)


def test_weights_left_in_safetensors_files_are_found(tmp_path: Path) -> None:
    save_weights({"x": torch.arange(3.0), "y": torch.ones(2)}, tmp_path)
    file = str(tmp_path / "model.safetensors")
    index = {"x": {"safetensors_file": file}, "z": {"safetensors_file": file, "weight_name": "y", "dtype": "float16"}}
    loader = OffloadedWeightsLoader(state_dict={"m": torch.zeros(1)}, index=index, device="cpu")
    assert list(loader) == ["m", "x", "z"]
    assert loader["x"].tolist() == [0, 1, 2]
    assert loader["z"].dtype == torch.float16
    with pytest.raises(KeyError, match="nothing"):
        loader["nothing"]


def test_an_offloader_needs_something_to_look_at() -> None:
    with pytest.raises(SettingError, match="neither state_dict"):
        OffloadedWeightsLoader()


def test_a_view_with_a_prefix() -> None:
    seen = PrefixedDataset({"a.w": 1, "a.b": 2, "ab.w": 3}, "a.")
    assert seen["w"] == 1
    assert list(seen) == ["a.w", "a.b"]


def test_a_file_that_is_missing_or_too_short_is_refused_with_numbers(tmp_path: Path) -> None:
    index = offload_weight(torch.zeros(10), "w", tmp_path, {})
    assert index is not None
    path = tmp_path / "w.dat"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"It has 36 bytes; shape \(10,\) in torch\.float32 takes 40"):
        load_offloaded_weight(path, index["w"])
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_offloaded_weight(path, index["w"])
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="'float31'"):
        load_offloaded_weight(path, {"dtype": "float31", "shape": [1]})


def test_what_cannot_be_offloaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="meta device"):
        offload_weight(torch.zeros(1, device="meta"), "w", tmp_path)
    for name in ("../w", "a/w", "", "a\\w"):
        with pytest.raises(CheckpointError, match="name of a weight is not valid"):
            offload_weight(torch.zeros(1), name, tmp_path)


def test_a_full_disk_is_a_typed_error_and_leaves_files_as_they_were(tmp_path: Path) -> None:
    offload_weight(torch.ones(2), "w", tmp_path)
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match=r"Cannot offload 'w' \(8000 bytes\)"):
            offload_weight(torch.zeros(2000), "w", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    (file,) = tmp_path.iterdir()
    assert (file.name, file.stat().st_size) == ("w.dat", 8)


ENTRY = st.dictionaries(
    st.sampled_from(["dtype", "shape", "safetensors_file", "weight_name"]),
    st.text(max_size=5) | st.integers() | st.lists(st.integers(-2, 2**65), max_size=2) | st.none(),
)


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=60))
def test_an_index_of_any_bytes_is_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "index.json").write_bytes(content)
    with contextlib.suppress(ValueError):
        assume(json.loads(content) != {})
    with pytest.raises(CheckpointError):
        OffloadedWeightsLoader(save_folder=folder)


@settings(max_examples=150, deadline=None)
@given(others=st.dictionaries(st.text(max_size=6).filter(lambda name: name != "good"), ENTRY))
@example(others={})
@example(others={"gone": {"dtype": "float32", "shape": [2]}})
def test_entries_of_an_index_are_read_or_refused_apart_from_the_others(
    tmp_path_factory: pytest.TempPathFactory, others: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    index = offload_weight(torch.ones(2), "good", str(folder), {})
    (folder / "index.json").write_text(json.dumps({**index, **others}))
    try:
        loader = OffloadedWeightsLoader(save_folder=folder)
    except CheckpointError:
        # An entry that is none of the two kinds makes the whole index unreadable.
        assert others
        assert others != {"gone": {"dtype": "float32", "shape": [2]}}
        return
    assert torch.equal(loader["good"], torch.ones(2))
    for name in others:
        with pytest.raises(CheckpointError):
            loader[name]


def test_converted_weights_are_not_kept(tmp_path: Path) -> None:
    state = {f"w{number}": torch.randn(64) for number in range(8)}
    save_weights(state, tmp_path)
    place = {"safetensors_file": str(tmp_path / "model.safetensors")}
    loader = OffloadedWeightsLoader(index={name: {**place, "dtype": "float16"} for name in state})
    as_stored = OffloadedWeightsLoader(index=dict.fromkeys(state, place))
    given = []
    for name, weight in loader.items():
        assert torch.equal(weight, state[name].half())
        given.append(weakref.ref(weight))
    del weight
    assert [reference() for reference in given] == [None] * 8
    assert all(as_stored[name] is as_stored[name] for name in state)


def test_a_layer_does_not_keep_converted_weights_between_its_forwards(tmp_path: Path) -> None:
    layer = nn.Linear(16, 16)
    save_weights(layer.state_dict(), tmp_path)
    place = {"safetensors_file": str(tmp_path / "model.safetensors"), "dtype": "bfloat16"}
    layer.bfloat16()
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(x)
    given: list[weakref.ref[torch.Tensor]] = []

    class Noting(OffloadedWeightsLoader):
        def __getitem__(self, key: str) -> torch.Tensor:
            weight = super().__getitem__(key)
            given.append(weakref.ref(weight))
            return weight

    weights = Noting(index={"weight": place, "bias": place})
    add_hook_to_module(layer, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(layer(x), expected)
    gc.collect()
    assert given
    assert [reference() for reference in given] == [None] * len(given)


GROWTH = """
import re, sys
import torch
from accel_bigmodel import OffloadedWeightsLoader, save_weights

def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024

names = [f"w{number}" for number in range(64)]
save_weights({name: torch.zeros(512, 1024) for name in names}, sys.argv[1])
place = {"safetensors_file": sys.argv[1] + "/model.safetensors", "dtype": "float16"}
loader, before = OffloadedWeightsLoader(index=dict.fromkeys(names, place)), resident()
for name in loader:
    loader[name].sum()
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_converted_weights_do_not_fill_the_memory(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", GROWTH, str(tmp_path)], capture_output=True, text=True, check=True)
    # All of them take 64 MiB, and one takes 1.
    assert int(run.stdout) < 32
