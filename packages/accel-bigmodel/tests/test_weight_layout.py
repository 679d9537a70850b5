from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accel_bigmodel.meta import init_empty_weights
from accel_bigmodel.weight_layout import StoredWeight, layout_of
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


def test_a_layout_keeps_the_files_that_a_load_fills_in() -> None:
    layout = layout_of(nn.Linear(2, 2))
    stored = StoredWeight(Path("/model.safetensors"), "weight", None, 120, 16)
    filled = layout.with_files({"weight": stored, "surplus": stored})
    assert filled.weights["weight"].stored == stored
    assert filled.weights["bias"].stored is None
    assert list(filled.weights) == list(layout.weights)
    assert layout.weights["weight"].stored is None


def test_a_layout_refuses_a_map_that_leaves_weights_without_a_device() -> None:
    with pytest.raises(SettingError, match=r"1\.weight"):
        layout_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {"0": "cpu"})


def test_a_tied_weight_has_the_bytes_of_the_name_that_the_file_holds() -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    model[1].weight = model[0].weight
    layout = layout_of(model, {"": "disk"})
    assert layout.offload_index() == {}
    filled = layout.with_files({"0.weight": StoredWeight(Path("/model.safetensors"), "0.weight", None, 120, 32)})
    entry = {"safetensors_file": "/model.safetensors", "weight_name": "0.weight"}
    assert filled.offload_index() == {"0.weight": entry, "1.weight": entry}


def test_an_index_is_empty_where_bytes_of_a_weight_on_the_disk_are_unknown() -> None:
    layout = layout_of(nn.Linear(2, 2), {"": "disk"})
    safe = StoredWeight(Path("/model.safetensors"), "weight", None, 120, 16)
    pickled = StoredWeight(Path("/pytorch_model.bin"), "bias")
    assert layout.with_files({"weight": safe, "bias": pickled}).offload_index() == {}
