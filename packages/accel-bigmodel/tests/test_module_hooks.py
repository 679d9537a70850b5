from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel import (
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_layerwise_casting_hooks,
    cpu_offload_with_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accel_state.errors import SettingError


class Add(ModelHook):
    def __init__(self, number: float = 1) -> None:
        self.number, self.failed, self.on = number, 0, True

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + self.number, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output * 2

    def forward_failed(self, module: nn.Module) -> None:
        self.failed += 1

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.on = False
        return module


class Fails(nn.Module):
    def forward(self, x: Any) -> Any:
        raise ValueError("inside")


def test_a_hook_runs_before_and_after_and_comes_off_without_a_trace() -> None:
    layer, x, hook = nn.Linear(2, 2), torch.ones(1, 2), Add()
    plain = layer(x)
    assert add_hook_to_module(layer, hook) is layer
    assert torch.equal(layer(x), 2 * nn.functional.linear(x + 1, layer.weight, layer.bias))
    assert type(layer) is nn.Linear
    remove_hook_from_module(layer)
    assert torch.equal(layer(x), plain)
    assert not hook.on
    assert not {"_hf_hook", "_old_forward", "forward"} & vars(layer).keys()


def test_a_hook_replaces_another_or_is_appended() -> None:
    layer, x = nn.Identity(), torch.zeros(1)
    first = Add(1)
    add_hook_to_module(layer, first)
    add_hook_to_module(layer, Add(10))
    assert layer(x).item() == 20
    assert not first.on
    add_hook_to_module(layer, Add(100), append=True)
    assert isinstance(layer._hf_hook, SequentialHook)
    assert layer(x).item() == 440


def test_a_hook_can_switch_gradients_off() -> None:
    class Quiet(ModelHook):
        no_grad = True

    layer = add_hook_to_module(nn.Linear(2, 2), Quiet())
    assert not layer(torch.ones(1, 2)).requires_grad


def test_a_forward_that_raises_tells_every_hook() -> None:
    module, hooks = Fails(), [Add(), Add()]
    add_hook_to_module(module, SequentialHook(*hooks))
    with pytest.raises(ValueError, match="inside"):
        module(torch.ones(1))
    assert [hook.failed for hook in hooks] == [1, 1]


def test_a_hook_that_raises_undoes_those_before_it() -> None:
    class Refuses(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("refused")

    first = Add()
    module = add_hook_to_module(nn.Identity(), SequentialHook(first, Refuses()))
    with pytest.raises(ValueError, match="refused"):
        module(torch.ones(1))
    assert first.failed == 1


def test_hooked_modules_can_be_copied_and_pickled() -> None:
    layer = add_hook_to_module(nn.Linear(2, 2), Add())
    x = torch.ones(1, 2)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))
        with torch.no_grad():
            other.weight.zero_()
        assert not torch.equal(other(x), layer(x))


def test_hooks_come_off_a_whole_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    for module in model.modules():
        add_hook_to_module(module, Add())
    remove_hook_from_submodules(model)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


def test_a_forward_of_an_instance_is_given_back() -> None:
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x * 3  # type: ignore[method-assign]
    add_hook_to_module(layer, Add())
    remove_hook_from_module(layer)
    assert layer(torch.ones(1)).item() == 3


def test_models_on_the_cpu_take_turns() -> None:
    first, first_hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    second, second_hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=first_hook)
    assert second(first(torch.ones(1, 2))).shape == (1, 2)
    second_hook.offload()
    first_hook.remove()
    assert not hasattr(first, "_hf_hook")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


def test_layers_are_kept_small_and_computed_wide() -> None:
    model, x = Net().eval(), torch.ones(1, 8)
    expected = copy.deepcopy(model)
    for layer in (expected.up, expected.down):
        layer.to(torch.float8_e4m3fn).to(torch.float32)
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.float32)
    assert model.up.weight.dtype == torch.float8_e4m3fn
    assert model.norm.weight.dtype == torch.float32
    stored = model.up.weight
    with torch.no_grad():
        assert torch.equal(model(x), expected(x))
        assert torch.equal(model(x), expected(x))
    assert model.up.weight is stored
    assert isinstance(model.up._hf_hook, LayerwiseCastingHook)


def test_layers_are_skipped_by_name_and_class_and_restored_after_an_error() -> None:
    model = Net()
    attach_layerwise_casting_hooks(model, torch.float8_e4m3fn, torch.bfloat16, skip_modules_pattern="^do")
    assert model.down.weight.dtype == torch.float32
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model.up(torch.ones(1, 3))
    assert model.up.weight.dtype == torch.float8_e4m3fn
    other = Net()
    attach_layerwise_casting_hooks(other, torch.float16, torch.float32, skip_modules_classes=(nn.Linear,))
    assert other.up.weight.dtype == torch.float32
    with pytest.raises(SettingError, match=r"torch\.int8 is not a floating-point"):
        attach_layerwise_casting_hooks(other, torch.int8, torch.float32)


class RaisesAfterwards(Add):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        raise ValueError("afterwards")


class RaisesAgain(Add):
    def forward_failed(self, module: nn.Module) -> None:
        super().forward_failed(module)
        raise ValueError("again")


def test_a_hook_that_raises_after_the_forward_undoes_those_behind_it() -> None:
    hooks = Add(), RaisesAfterwards(), Add(), RaisesAgain(), Add()
    module = add_hook_to_module(nn.Identity(), SequentialHook(*hooks))
    with pytest.raises(ValueError, match="again"):
        module(1)
    assert [hook.failed for hook in hooks] == [0, 0, 1, 1, 1]
