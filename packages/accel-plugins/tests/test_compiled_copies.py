"""Compiled copies of models whose forward was replaced: the copy runs its own modules, and follows train and eval."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_bigmodel.dispatch import cpu_offload
from accel_bigmodel.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accel_ops import convert_outputs_to_fp32
from accel_plugins import Context, extract_model_from_parallel, is_compiled_module
from accel_plugins.precision import choose
from accel_plugins.transforms.activation_checkpoint import ActivationCheckpoint
from accel_plugins.transforms.compile import (
    Compile,
    compile_regions,
    compile_regions_in_place,
    has_compiled_regions,
)
from accel_plugins.transforms.config import TorchDynamoPlugin
from accel_state import PartialState, current
from accel_state.devices.select import family_of
from accel_state.gradient import GradientState

CPU = family_of("cpu")
INPUTS = torch.ones(2, 4)

pytestmark = [
    # Dynamo itself looks at the gradient of an intermediate tensor.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Dynamo breaks the graph at the lock of the hooks that offload.
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin"),
]


class Model(nn.Module):
    """Its root has a dropout and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = nn.functional.dropout(inputs * self.scale, 0.5, self.training)
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.head(hidden)
        return out


def hooked() -> nn.Module:
    return add_hook_to_module(Model(), ModelHook())


def autocast(model: nn.Module, precision: str = "bf16") -> nn.Module:
    return choose(precision, CPU).prepare(model)


def recomputing(model: nn.Module) -> nn.Module:
    context: Any = None
    return ActivationCheckpoint().apply(model, context)


def hooked_after_autocast() -> nn.Module:
    return add_hook_to_module(autocast(Model()), ModelHook())


def with_partial_forward() -> nn.Module:
    model = Model()
    model.forward = functools.partial(Model.forward, model)
    return model


def compiled_as_a_whole_in_place() -> nn.Module:
    model = autocast(Model())
    model.compile(backend="eager")
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Model,
    "bf16": lambda: autocast(Model()),
    "fp16": lambda: autocast(Model(), "fp16"),
    "hook": hooked,
    "hook, then bf16": lambda: autocast(hooked()),
    "bf16, then hook": hooked_after_autocast,
    "offloaded": lambda: cpu_offload(Model(), execution_device="cpu"),
    "recomputed": lambda: recomputing(autocast(Model())),
    "partial": with_partial_forward,
    "compiled in place": compiled_as_a_whole_in_place,
}


class Counting:
    """A compiler that counts the calls of what it compiled."""

    def __init__(self) -> None:
        self.calls = 0

    def __deepcopy__(self, memo: Any) -> Counting:
        return self

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self.calls += 1
            return graph.forward(*arguments)

        return run


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check_copy(copied: nn.Module, original: nn.Module, shares: bool) -> None:
    """The copy follows train and eval, and computes with its own parameters."""
    expected = Model().eval()(INPUTS)
    original.train()
    copied.eval()
    assert not any(part.training for part in copied.modules())
    assert torch.allclose(copied(INPUTS).float(), expected, atol=0.05)
    copied.train()
    assert len({tuple(copied(INPUTS).flatten().tolist()) for _ in range(8)}) > 1
    copied.eval()
    original.eval()
    with torch.no_grad():
        for parameter in original.parameters():
            if not parameter.is_meta:
                parameter.zero_()
    assert bool(copied(INPUTS).any()) is not shares


@pytest.mark.parametrize("name", MODELS)
def test_regions_are_compiled_and_follow_train_and_eval(name: str) -> None:
    compiler, model = Counting(), MODELS[name]()
    names = list(model.state_dict())
    copied = compile_regions(model, backend=compiler)

    copied.eval()(INPUTS)
    assert compiler.calls >= 3
    assert has_compiled_regions(copied)
    assert [name.replace("_orig_mod.", "") for name in copied.state_dict()] == names
    assert extract_model_from_parallel(copied, keep_torch_compile=False) is model
    if name != "offloaded":
        check_copy(copied, model, shares=True)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "offloaded"])
def test_a_deep_copy_of_compiled_regions_has_everything_of_its_own(name: str) -> None:
    compiler = Counting()
    copied = compile_regions(MODELS[name](), backend=compiler)
    check_copy(copy.deepcopy(copied), copied, shares=False)
    assert compiler.calls >= 3


@pytest.mark.parametrize(
    ("name", "in_place"), [(name, False) for name in MODELS if name != "offloaded"] + [("bf16", True), ("hook", True)]
)
def test_a_deep_copy_has_everything_of_its_own(name: str, in_place: bool) -> None:
    model = MODELS[name]()
    if in_place:
        compile_regions_in_place(model, backend="eager")
    copied = copy.deepcopy(model)
    assert list(copied.state_dict()) == list(Model().state_dict())
    check_copy(copied, model, shares=False)


@pytest.mark.parametrize("name", ["bf16", "hook", "recomputed"])
def test_a_model_compiled_as_a_whole_follows_train_and_eval(name: str) -> None:
    model = MODELS[name]()
    check_copy(torch.compile(model, backend="eager"), model, shares=True)


def test_a_hook_can_be_removed_from_compiled_regions() -> None:
    model = hooked()
    copied = remove_hook_from_module(compile_regions(model, backend="eager"))
    assert copied.forward.__self__ is copied
    check_copy(copied, model, shares=True)


def test_a_function_with_forward_in_its_name_does_not_end_regional_compilation() -> None:
    model = Model()
    model.feed_forward_activation = torch.relu  # type: ignore[assignment]
    copied = compile_regions(model, backend="eager")
    assert not is_compiled_module(copied)
    assert has_compiled_regions(copied)


def test_a_model_whose_forward_is_a_function_is_compiled_as_a_whole() -> None:
    compiler, model = Counting(), Model()
    model.forward = convert_outputs_to_fp32(model.forward)
    copied = compile_regions(model, backend=compiler)
    assert is_compiled_module(copied)
    check_copy(copied, model, shares=True)
    assert compiler.calls >= 1


def test_regions_that_are_compiled_already_stay_as_they_are() -> None:
    compiler, model = Counting(), autocast(Model())
    once: Any = compile_regions(model, backend=compiler)
    twice: Any = compile_regions(once, backend="inductor")
    assert [*twice.layers, twice.head] == [*once.layers, once.head]
    check_copy(twice, model, shares=True)
    assert compiler.calls >= 3


def test_a_deep_copy_of_a_model_with_compiled_blocks_is_compiled_again(cpu_state: PartialState) -> None:
    process = current.process()
    context = Context(process, GradientState(), choose("no", process.family))
    model = Compile(TorchDynamoPlugin(backend="eager", use_regional_compilation=True)).apply(Model(), context)
    copied = copy.deepcopy(model)
    assert not has_compiled_regions(copied)
    transform = Compile(TorchDynamoPlugin(backend="eager"))
    assert transform.apply(model, context) is model
    assert has_compiled_regions(transform.apply(copied, context))
