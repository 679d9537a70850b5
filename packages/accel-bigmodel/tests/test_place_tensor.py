from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_bigmodel import set_module_tensor_to_device
from accel_state.errors import SettingError, ShapeMismatch


class Own(nn.Parameter):
    pass


def test_a_value_replaces_a_tensor_and_takes_its_dtype() -> None:
    model = nn.Sequential(nn.Linear(2, 2).to("meta"), nn.BatchNorm1d(2))
    set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(2, 2, dtype=torch.float64))
    assert model[0].weight.dtype == torch.float32
    assert isinstance(model[0].weight, nn.Parameter)
    set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.ones(2, 2), dtype="bfloat16")
    assert model[0].weight.dtype == torch.bfloat16
    set_module_tensor_to_device(model, "1.num_batches_tracked", "cpu", value=torch.tensor(3), dtype=torch.float16)
    assert model[1].num_batches_tracked.dtype == torch.int64
    set_module_tensor_to_device(model, "1.running_mean", "meta")
    assert model[1].running_mean.is_meta


def test_a_tensor_that_is_there_already_stays_the_same_object() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight
    set_module_tensor_to_device(layer, "weight", "cpu")
    assert layer.weight is weight


def test_class_attributes_and_gradients_of_a_parameter_are_kept() -> None:
    layer = nn.Linear(2, 2)
    layer.weight = Own(torch.zeros(2, 2), requires_grad=False)
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2), fp16_statistics=torch.ones(2))
    assert type(layer.weight) is Own
    assert not layer.weight.requires_grad
    assert layer.weight.SCB.tolist() == [1, 1]


def test_tied_copies_are_made_once_for_each_device() -> None:
    value = torch.ones(2, 2)
    tied: dict[int, dict[torch.device, torch.Tensor]] = {value.data_ptr(): {}}
    layers = [nn.Linear(2, 2, dtype=torch.bfloat16, device="meta") for _ in range(2)]
    for layer in layers:
        set_module_tensor_to_device(layer, "weight", "cpu", value=value, tied_params_map=tied)
    assert layers[0].weight.data_ptr() == layers[1].weight.data_ptr()


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    layer = nn.Linear(2, 3, device="meta")
    with pytest.raises(ShapeMismatch, match=r"shape \(2, 2\), the module expects \(3, 2\)"):
        set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2))
    with pytest.raises(SettingError, match="on the meta device"):
        set_module_tensor_to_device(layer, "weight", "cpu")
    with pytest.raises(SettingError, match="no parameter or buffer"):
        set_module_tensor_to_device(layer, "wieght", "cpu")
    with pytest.raises(SettingError, match=r"Cannot find '7\.weight'"):
        set_module_tensor_to_device(layer, "7.weight", "cpu")
    with pytest.raises(SettingError, match="disk"):
        set_module_tensor_to_device(layer, "weight", "disk", value=torch.ones(3, 2))
    assert layer.weight.is_meta
