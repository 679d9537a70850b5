"""Old functions about weights and modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import (
    clean_state_dict_for_safetensors,
    get_model_tp_size,
    get_module_children_bottom_up,
    model_has_dtensor,
)


def test_weights_as_safetensors_can_hold_them() -> None:
    tied = torch.arange(4.0).reshape(2, 2)
    cleaned = clean_state_dict_for_safetensors({"b": tied, "a": tied, "c": torch.ones(2, 3).t()})
    assert list(cleaned) == ["b", "c"]
    assert cleaned["c"].is_contiguous()


def test_two_rows_of_one_tensor_are_two_weights() -> None:
    whole = torch.arange(4.0).reshape(2, 2)
    cleaned = clean_state_dict_for_safetensors({"x": whole[0], "y": whole[1]})
    assert {name: tensor.tolist() for name, tensor in cleaned.items()} == {"x": [0.0, 1.0], "y": [2.0, 3.0]}


def test_modules_from_the_inside_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    named = get_module_children_bottom_up(model, return_fqns=True)
    assert [name for name, _ in named] == ["0", "1.0", "1.1", "1", ""]
    assert get_module_children_bottom_up(model) == [module for _, module in named]
    assert get_module_children_bottom_up(nn.ReLU(), return_fqns=True)[0][0] == ""


def test_questions_about_divided_models() -> None:
    model: Any = nn.Linear(1, 1)
    assert not model_has_dtensor(model)
    assert get_model_tp_size(model) is None
    model.tp_size = 4
    assert get_model_tp_size(model) == 4


def test_classes_at_the_top_of_accelerate() -> None:
    import accelerate

    for name in ("ProfileKwargs", "TorchTensorParallelPlugin", "ProjectConfiguration", "GradientAccumulationPlugin"):
        assert getattr(accelerate, name) is getattr(accelerate.utils, name)
    from accelerate.local_sgd import LocalSGD

    assert LocalSGD.__module__ == "accel_torch.local_sgd"
    assert accelerate.Accelerator is Accelerator
