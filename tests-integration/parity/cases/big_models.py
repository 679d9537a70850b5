"""Models that are placed on several devices, as far as one CPU and the disk go."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from torch import nn

from accelerate import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    find_executable_batch_size,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from accelerate.utils import (
    calculate_maximum_sizes,
    check_device_map,
    compute_module_sizes,
    convert_file_size_to_int,
    find_tied_parameters,
    get_max_layer_size,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, inputs: Any) -> Any:
        return self.second(self.first(inputs).relu())


def _network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Block(8), Block(8), nn.Linear(8, 2))


def sizes() -> Any:
    model = _network()
    return [dict(compute_module_sizes(model)), dict(compute_module_sizes(model, dtype=torch.float16))]


def largest_layers() -> Any:
    model = _network()
    total, layer = calculate_maximum_sizes(model)
    found = get_max_layer_size(list(model.named_children()), compute_module_sizes(model), ["Block"])
    return [total, list(layer), list(found)]


def _device_map(limits: dict[Any, int], **options: Any) -> Any:
    made = infer_auto_device_map(_network(), max_memory=limits, **options)  # type: ignore[arg-type]
    return sorted((name, str(device)) for name, device in made.items())


def a_map_over_one_device() -> Any:
    return _device_map({0: 1200, "cpu": 10**6})


def a_map_over_two_devices() -> Any:
    return _device_map({0: 900, 1: 1400, "cpu": 10**6})


def a_map_that_ends_on_disk() -> Any:
    return _device_map({0: 1200, "cpu": 400})


def a_map_of_whole_blocks() -> Any:
    return _device_map({0: 900, 1: 1400, "cpu": 10**6}, no_split_module_classes=["Block"])


def a_map_of_one_place() -> Any:
    return _device_map({"cpu": 10**6})


def a_budget_that_leaves_no_room_to_compute() -> Any:
    return _device_map({0: 500, 1: 700, "cpu": 10**6})


def a_map_that_forgets() -> Any:
    return check_device_map(_network(), {"0": "cpu"})


def without_weights() -> Any:
    with init_empty_weights():
        model = _network()
    with init_empty_weights(include_buffers=True):
        norm = nn.BatchNorm1d(2)
    with init_on_device(torch.device("meta")):
        other = nn.Linear(1, 1)
    return [model[2].weight.device.type, norm.running_mean.device.type, other.weight.device.type]


def offloaded_to_memory() -> Any:
    model = _network()
    expected = model(torch.ones(1, 8))
    cpu_offload(model, execution_device=torch.device("cpu"))
    devices = sorted({parameter.device.type for parameter in model.parameters()})
    return [devices, torch.equal(expected, model(torch.ones(1, 8)))]


def offloaded_to_disk() -> Any:
    model = _network()
    expected = model(torch.ones(1, 8))
    folder = tempfile.mkdtemp()
    disk_offload(model, folder, execution_device=torch.device("cpu"))
    return [sorted(os.listdir(folder)), torch.allclose(expected, model(torch.ones(1, 8)))]


def spread() -> Any:
    model = _network()
    expected = model(torch.ones(1, 8))
    spread_map = {"0": "cpu", "1": "disk", "2": "cpu"}
    dispatch_model(model, spread_map, main_device="cpu", offload_dir=tempfile.mkdtemp())
    devices = {name: parameter.device.type for name, parameter in model.named_parameters()}
    return [model.hf_device_map, devices, torch.allclose(expected, model(torch.ones(1, 8)))]


def loaded() -> Any:
    from safetensors.torch import save_file

    model = _network()
    folder = tempfile.mkdtemp()
    save_file(model.state_dict(), f"{folder}/model.safetensors")
    with init_empty_weights():
        empty = _network()
    expected = model(torch.ones(1, 8))
    made = load_checkpoint_and_dispatch(empty, folder, device_map={"": "cpu"})
    return [torch.equal(expected, made(torch.ones(1, 8))), made.hf_device_map]


def loaded_in_half_precision() -> Any:
    model = _network()
    folder = tempfile.mkdtemp()
    torch.save(model.state_dict(), f"{folder}/pytorch_model.bin")
    other = _network()
    load_checkpoint_in_model(other, folder, dtype=torch.float16)
    return sorted({str(parameter.dtype) for parameter in other.parameters()})


def loaded_from_an_empty_folder() -> Any:
    return load_checkpoint_in_model(_network(), tempfile.mkdtemp())


def tied() -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    found = find_tied_parameters(model)
    model[2].weight = nn.Parameter(torch.zeros(2, 2))
    retie_parameters(model, found)
    return [found, model[2].weight is model[0].weight]


def placed_by_hand() -> Any:
    model = nn.Linear(2, 2)
    set_module_tensor_to_device(model, "weight", "meta")
    before = model.weight.device.type
    set_module_tensor_to_device(model, "weight", "cpu", value=torch.full((2, 2), 3.0))
    return [before, model.weight.tolist(), sorted(name for name, _ in named_module_tensors(model))]


def a_value_of_another_shape() -> Any:
    return set_module_tensor_to_device(nn.Linear(2, 2), "weight", "cpu", value=torch.ones(3, 3))


def file_sizes() -> Any:
    return [convert_file_size_to_int(size) for size in ("1MiB", "1GB", "10KB", "1GiB", "2MB", 7)]


def smaller_batches() -> Any:
    tried = []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if batch_size > 4:
            raise RuntimeError("CUDA out of memory.")
        return batch_size

    return [train(), tried]
