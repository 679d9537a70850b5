from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_bigmodel.meta import init_empty_weights
from accel_bigmodel.weight_files import save_weights_file
from accel_bigmodel.weight_files.reading import StoredWeight, WeightSource, open_weights
from accel_bigmodel.weight_layout import layout_of
from accel_state.errors import SettingError


def tied_model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 4, bias=False))
    model[2].weight = model[0].weight
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    return model


def test_a_layout_lists_parameters_and_persistent_buffers_with_their_devices() -> None:
    with init_empty_weights():
        model = tied_model()
    layout = layout_of(model, {"0": "cpu", "1": "disk", "2.weight": "cpu"})
    assert list(layout.weights) == [
        *("0.weight", "1.weight", "1.bias", "2.weight"),
        *("1.running_mean", "1.running_var", "1.num_batches_tracked"),
    ]
    assert layout.weights["0.weight"].shape == (4, 2)
    assert layout.weights["0.weight"].dtype == torch.float32
    assert [weight.is_buffer for weight in layout.weights.values()] == [False] * 4 + [True] * 3
    assert layout.names_on("disk") == [name for name in layout.weights if name.startswith("1.")]
    assert layout.tied == (("0.weight", "2.weight"),)


def test_a_layout_without_a_map_takes_the_devices_of_the_tensors() -> None:
    layout = layout_of(nn.Linear(2, 2))
    assert {str(weight.device) for weight in layout.weights.values()} == {"cpu"}


def stored(path: Path, name: str) -> StoredWeight:
    """A weight in a file of its own."""
    save_weights_file({name: torch.zeros(4, 2)}, path)
    return open_weights([WeightSource(path)])[name]


def test_a_layout_keeps_the_files_that_a_load_fills_in(tmp_path: Path) -> None:
    layout = layout_of(nn.Linear(2, 4))
    weight = stored(tmp_path / "model.safetensors", "weight")
    filled = layout.with_files({"weight": weight, "surplus": weight})
    assert filled.weights["weight"].stored is weight
    assert filled.weights["bias"].stored is None
    assert list(filled.weights) == list(layout.weights)
    assert layout.weights["weight"].stored is None


def test_a_layout_refuses_a_map_that_leaves_weights_without_a_device() -> None:
    with pytest.raises(SettingError, match=r"1\.weight"):
        layout_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"0": "cpu"})


def test_a_tied_weight_has_the_file_of_the_name_that_the_file_holds(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight
    layout = layout_of(model, {"": "disk"})
    assert layout.in_safetensors("disk") == {}
    weight = stored(tmp_path / "model.safetensors", "0.weight")
    filled = layout.with_files({"0.weight": weight})
    assert filled.in_safetensors("disk") == {"0.weight": weight, "1.weight": weight}
    assert filled.in_safetensors("cpu") == {}


def test_only_weights_in_safetensors_files_stay_in_them(tmp_path: Path) -> None:
    layout = layout_of(nn.Linear(2, 4), {"": "disk"})
    safe = stored(tmp_path / "model.safetensors", "weight")
    pickled = stored(tmp_path / "pytorch_model.bin", "bias")
    assert layout.with_files({"weight": safe, "bias": pickled}).in_safetensors("disk") == {"weight": safe}


def test_a_copied_weight_maps_its_file_again(tmp_path: Path) -> None:
    save_weights_file({"weight": torch.arange(10_000)}, tmp_path / "model.safetensors")
    weight = open_weights([WeightSource(tmp_path / "model.safetensors")])["weight"]
    pickled = pickle.dumps(weight)
    assert len(pickled) < 1000
    assert torch.equal(pickle.loads(pickled).mapped(), torch.arange(10_000))
