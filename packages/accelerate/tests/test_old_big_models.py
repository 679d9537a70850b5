"""Functions for large models that only scripts for the original call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import compute_module_sizes, disk_offload, offload_weight, save_weights_file
from accel_state.errors import SettingError
from accelerate.hooks import (
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_submodules,
)
from accelerate.utils.modeling import (
    calculate_maximum_sizes,
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    compute_module_total_buffer_size,
    fallback_allocate,
    get_module_leaves,
    get_module_size_with_ties,
    get_state_dict_from_offload,
    load_offloaded_weights,
    load_state_dict,
)
from accelerate.utils.offload import extract_submodules_state_dict


def layers() -> tuple[list[tuple[str, nn.Module]], dict[str, int]]:
    model = nn.Sequential()
    model.large, model.small = nn.Linear(10, 10), nn.Linear(4, 4)
    model.two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return list(model.named_children()), compute_module_sizes(model)


@pytest.mark.parametrize(
    ("limit", "whole", "found", "left"),
    [
        (1000, None, "large", ["small", "two"]),
        ("100KB", None, "large", ["small", "two"]),
        (100, None, "small", ["large", "two"]),
        (60, None, "two.1", ["large", "small", "two.0"]),
        (60, ["Sequential"], None, ["large", "small", "two"]),
        (10, None, None, ["large", "small", "two"]),
    ],
)
def test_the_first_module_that_is_small_enough(limit: Any, whole: Any, found: str | None, left: list[str]) -> None:
    name, module, rest = fallback_allocate(*layers(), limit, whole)
    assert (name, [other for other, _ in rest]) == (found, left)
    assert (module is None) == (found is None)


def test_modules_that_share_weights_count_together() -> None:
    modules, sizes = layers()
    ties = [["small.weight", "two.0.weight"]]
    # 80 bytes, and 120 of the other without the shared 64.
    assert get_module_size_with_ties(["two.0.weight"], 80, sizes, modules)[:2] == (136, ["two"])
    assert get_module_size_with_ties([], 80, sizes, modules) == (80, [], [])
    assert fallback_allocate(modules, sizes, 100, None, ties)[0] == "two.0"
    with pytest.raises(SettingError, match=r"'nowhere\.weight'"):
        get_module_size_with_ties(["nowhere.weight"], 80, sizes, modules)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(4)])
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.emb(ids))  # type: ignore[no-any-return]


def test_sizes_of_a_model_and_of_its_buffers() -> None:
    model = Model()
    sizes = compute_module_sizes(model)
    assert sizes[""] == sum(sizes[leaf] for leaf in get_module_leaves(sizes)) == 160 + 160 + 320 + 16
    assert compute_module_total_buffer_size(model) == 16
    assert calculate_maximum_sizes(model) == (sizes[""], (160, ["emb", "head"]))
    model._no_split_modules = ["ModuleList"]  # type: ignore[assignment]
    assert calculate_maximum_sizes(model)[1] == (320, ["blocks"])


def test_tied_names_on_two_devices_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    check_tied_parameters_on_same_device([["a.x.w", "b.w"]], {"a": 0, "b": 0})
    assert caplog.text == ""
    check_tied_parameters_on_same_device([["a.x.w", "b.w"]], {"a": 0, "b": 1})
    assert "'a.x.w': 0, 'b.w': 1" in caplog.text


def test_a_config_says_that_embeddings_are_tied() -> None:
    model = Model()
    assert not check_tied_parameters_in_config(model)
    model.config = type("Config", (), {"tie_word_embeddings": True})()  # type: ignore[assignment]
    assert not check_tied_parameters_in_config(model)
    model.get_output_embeddings = lambda: model.head  # type: ignore[assignment]
    assert check_tied_parameters_in_config(model)


def test_offloaded_weights_come_back_into_a_model(tmp_path: Path) -> None:
    model, index = Model(), dict[str, Any]()
    weight = model.head.weight.detach().clone()
    offload_weight(model.head.weight, "head.weight", tmp_path, index)
    model.head.to("meta")
    load_offloaded_weights(model, index, tmp_path)
    assert torch.equal(model.head.weight, weight)


def test_offloaded_weights_of_a_module_in_a_state_dict(tmp_path: Path) -> None:
    model = Model()
    weight = model.head.weight.detach().clone()
    disk_offload(model, tmp_path)
    state = get_state_dict_from_offload(model.head, "head.weight", {"head.weight": None})
    assert torch.equal(state["head.weight"], weight)
    assert get_state_dict_from_offload(nn.Linear(2, 2), "layer.weight", {}) == {}


def test_parts_of_a_state_dict() -> None:
    state = {"a.w": torch.zeros(1), "ab.w": torch.zeros(1), "c": torch.zeros(1)}
    assert extract_submodules_state_dict(state, ["a", "c"]).keys() == {"a.w", "c"}
    assert extract_submodules_state_dict(state, [""]).keys() == state.keys()


def test_every_module_with_weights_computes_on_its_device() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ReLU())
    model.blocks = nn.ModuleList([nn.Linear(2, 2)])
    x = torch.ones(1, 2)
    expected = model[:3](x)
    attach_execution_device_hook(model, "cpu", preload_module_classes=["ModuleList"])
    hooked = [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    assert hooked == ["0", "1.0", "blocks"]
    assert torch.equal(model[:3](x), expected)
    remove_hook_from_submodules(model)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_hooks_of_names_that_the_model_lacks_are_not_attached() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    expected = model(x)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.warns(UserWarning, match=r"of Sequential: lm_head, tail\. They are ignored") as warned:
        attach_align_device_hook_on_blocks(
            model, {"": "cpu", "lm_head": "cpu"}, {"": True, "tail": True}, weights_map=weights
        )
    assert warned[0].filename == __file__
    assert model[1].weight.is_meta
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_one_file_as_a_state_dict_with_and_without_devices(tmp_path: Path, name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    save_weights_file(model.state_dict(), tmp_path / name)
    for device_map in (None, {"": "cpu", "1": "disk"}, {"0": "cpu"}):
        state = load_state_dict(tmp_path / name, device_map)
        assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    assert load_state_dict(tmp_path / name, {"1": "meta"})["1.weight"].is_meta
    with pytest.raises(SettingError, match="99"):
        load_state_dict(tmp_path / name, {"1": 99})
