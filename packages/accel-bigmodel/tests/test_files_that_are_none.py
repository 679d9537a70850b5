"""Pipes, devices and folders in the place of weight files, and names that no system has."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from accel_bigmodel import OffloadedWeightsLoader, load_offloaded_weight, offload_state_dict, save_weights
from accel_bigmodel.weight_files import load_weights, load_weights_file, read_index
from accel_state.errors import CheckpointError

ENTRY = {"dtype": "float32", "shape": [1]}


def read_offloaded(path: Path) -> object:
    return load_offloaded_weight(path, ENTRY)


@pytest.mark.skipif(os.name == "nt", reason="no pipes with names")
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
@pytest.mark.parametrize("read", [read_index, load_weights_file, load_weights, read_offloaded])
@pytest.mark.parametrize("name", ["w.bin", "w.safetensors"])
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], None], read: Callable[[Path], object], name: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(CheckpointError):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 1000 + "/y", "half\ud800", "\x1b[2J.safetensors"])
def test_an_index_with_an_impossible_file_name_is_a_typed_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "m.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError) as raised:
        load_weights(tmp_path)
    assert raised.value.obstacle.isprintable()
    assert len(str(raised.value)) < 2000


@pytest.mark.parametrize(
    "entry",
    [
        '{"dtype": "float32", "shape": [1e9999]}',
        '{"dtype": "float32", "shape": [9223372036854775807, 9223372036854775807]}',
        '{"dtype": "float32", "shape": [0, 9223372036854775807, 9223372036854775807]}',
        '{"dtype": "float32", "shape": [' + "1," * 5000 + "1]}",
        '{"dtype": "float32", "shape": [true]}',
        '{"dtype": "nn", "shape": [1]}',
        '{"dtype": "float32"}',
        '{"safetensors_file": "/dev/zero"}',
        '{"safetensors_file": "x\\u0000y"}',
        '{"safetensors_file": 3}',
    ],
)
def test_a_damaged_entry_of_an_offload_folder_is_a_typed_error(tmp_path: Path, entry: str) -> None:
    offload_state_dict(tmp_path, {"w": torch.zeros(1)})
    (tmp_path / "index.json").write_text(f'{{"w": {entry}}}')
    with pytest.raises(CheckpointError):
        OffloadedWeightsLoader(save_folder=tmp_path)["w"]


def test_a_header_with_a_long_shape_is_refused(tmp_path: Path) -> None:
    shape = ",".join(["9223372036854775807"] * 100_000)
    header = f'{{"w": {{"dtype": "F32", "shape": [{shape}], "data_offsets": [0, 4]}}}}'.encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        load_weights_file(tmp_path / "m.safetensors")


def test_metadata_of_a_header_are_texts(tmp_path: Path) -> None:
    save_weights({"w": torch.zeros(1)}, tmp_path)
    header = b'{"__metadata__": {"format": 3}}'
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        load_weights_file(tmp_path / "m.safetensors")
