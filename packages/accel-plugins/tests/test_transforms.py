from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accel_plugins import (
    Capabilities,
    Context,
    Manifest,
    Stage,
    Transform,
    extract_model_from_parallel,
    is_compiled_module,
)
from accel_plugins.blocks import blocks_of_class, get_module_class_from_name, repeated_blocks
from accel_plugins.bundle import Bundle
from accel_plugins.ddp.manifest import MANIFEST as DDP
from accel_plugins.fsdp.manifest import FSDP2
from accel_plugins.precision import choose
from accel_plugins.single.manifest import MANIFEST
from accel_plugins.transform import ordered
from accel_plugins.transforms.activation_checkpoint import ActivationCheckpoint
from accel_plugins.transforms.compile import (
    Compile,
    CompileBlocks,
    GradientCopies,
    compile_regions,
    compile_regions_in_place,
    has_compiled_regions,
)
from accel_plugins.transforms.config import TorchDynamoPlugin
from accel_state import PartialState, current
from accel_state.choices import DynamoBackend
from accel_state.errors import NotOffered, SettingError
from accel_state.gradient import GradientState


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.runs = 0

    def forward(self, inputs: Tensor, *, shift: float = 0.0) -> Tensor:
        self.runs += 1
        return nn.functional.dropout(self.linear(inputs) + shift, 0.5).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs, shift=0.1)
        out: Tensor = self.head(inputs)
        return out


@pytest.fixture
def context(cpu_state: PartialState) -> Context:
    process = current.process()
    return Context(process, GradientState(), choose("no", process.family))


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(4)
    model(torch.ones(3, 4)).sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("offload", [False, True])
def test_recomputed_blocks_give_the_same_gradients_with_dropout(context: Context, offload: bool) -> None:
    model = Model()
    expected, names = gradients(model), [name for name, _ in model.named_parameters()]
    transform = ActivationCheckpoint(offload=offload)
    for block in model.layers:
        block.runs = 0
    assert transform.apply(model, context) is model
    found = gradients(model)

    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [block.runs for block in model.layers] == [1 if offload else 2] * 2
    assert [name for name, _ in model.named_parameters()] == names
    assert sorted(model.state_dict()) == sorted(Model().state_dict())
    with torch.no_grad():
        model(torch.ones(3, 4))
    assert [block.runs for block in model.layers] == [2 if offload else 3] * 2


def test_checkpointing_is_applied_once_copied_and_undone(context: Context) -> None:
    model = Model()
    transform = ActivationCheckpoint(lambda given: blocks_of_class(given, ["Block"]))
    transform.apply(model, context)
    transform.apply(model, context)
    copied = copy.deepcopy(model)
    for block in (*model.layers, *copied.layers):
        block.runs = 0
    gradients(copied)
    assert [block.runs for block in copied.layers] == [2, 2]
    assert [block.runs for block in model.layers] == [0, 0]
    transform.undo(model)
    gradients(model)
    assert [block.runs for block in model.layers] == [1, 1]
    assert all("forward" not in vars(block) for block in model.layers)


def test_compiling_is_refused_where_torch_cannot(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    # As torch 2.9 says on Python 3.14.
    monkeypatch.setattr("torch._dynamo.is_dynamo_supported", lambda: False)
    bundle = Bundle.of([Model()])
    Compile(TorchDynamoPlugin(backend=DynamoBackend.NO)).check(bundle, context)
    with pytest.raises(NotOffered, match=rf"EAGER(?s:.)*torch {re.escape(torch.__version__)} cannot"):
        Compile(TorchDynamoPlugin(backend=DynamoBackend.EAGER)).check(bundle, context)


def test_a_model_without_blocks_is_refused(context: Context) -> None:
    with pytest.raises(SettingError, match="Linear"):
        ActivationCheckpoint().apply(nn.Linear(1, 1), context)


def test_blocks_are_found_by_list_and_class() -> None:
    model = Model()

    assert repeated_blocks(model) == list(model.layers)
    assert repeated_blocks(nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.ReLU()]))) == []
    assert blocks_of_class(model, ["Block"]) == list(reversed(model.layers))
    assert get_module_class_from_name(model, "Block") is Block
    assert get_module_class_from_name(model, "Absent") is None
    with pytest.raises(SettingError, match="'Block'"):
        blocks_of_class(model, ["Blok"])


# ---------------------------------------------------------------------------- compile


# Dynamo itself looks at the gradient of an intermediate tensor.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("regional", [False, True])
def test_a_compiled_model_computes_the_same_and_is_undone(context: Context, regional: bool) -> None:
    model = Model().eval()
    expected = gradients(model)
    transform = Compile(TorchDynamoPlugin(backend="eager", use_regional_compilation=regional))
    compiled = transform.apply(model, context)

    assert all(torch.allclose(a, b) for a, b in zip(gradients(compiled), expected, strict=True))
    assert is_compiled_module(compiled) is not regional
    assert has_compiled_regions(compiled)
    assert transform.apply(compiled, context) is compiled
    assert transform.undo(compiled) is model
    assert not has_compiled_regions(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_blocks_that_the_user_compiled_stay_as_they_are(context: Context) -> None:
    model = Model().eval()
    model.layers[0].compile(backend="eager")
    own = model.layers[0]._compiled_call_impl
    Compile(TorchDynamoPlugin(backend="eager", use_regional_compilation=True)).apply(model, context)
    assert model.layers[0]._compiled_call_impl is own
    assert model.layers[1]._compiled_call_impl is not None

    assert extract_model_from_parallel(model) is model
    assert model.layers[1]._compiled_call_impl is not None
    assert extract_model_from_parallel(model, keep_torch_compile=False) is model
    assert model.layers[1]._compiled_call_impl is None
    assert model.layers[0]._compiled_call_impl is own


# What a mode means stands in a module of torch that imports the old compiler.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is")
@pytest.mark.parametrize(("mode", "hooks"), [("reduce-overhead", 1), ("default", 0)])
@pytest.mark.parametrize("regional", [False, True])
def test_only_a_model_with_cuda_graphs_copies_its_gradients(
    context: Context, regional: bool, mode: str, hooks: int
) -> None:
    model = Model()
    settings = TorchDynamoPlugin(backend="inductor", mode=mode, use_regional_compilation=regional)
    # fsdp2 compiles blocks first, and then applies the other transform to the same model.
    CompileBlocks(settings).apply(model, context)
    compiled = Compile(settings).apply(model, context)
    assert sum(isinstance(hook, GradientCopies) for hook in compiled._forward_pre_hooks.values()) == hooks


def test_nothing_is_compiled_unless_asked(context: Context) -> None:
    model = Model()

    assert Compile(TorchDynamoPlugin()).apply(model, context) is model


# Dynamo itself looks at the gradient of an intermediate tensor.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_regions_share_everything_with_the_module_they_were_made_from() -> None:
    model = Model()
    regions: Any = compile_regions(model, backend="eager")

    assert type(regions) is Model
    assert all(is_compiled_module(part) for part in (*regions.layers, regions.head))
    assert not any(is_compiled_module(part) for part in (*model.layers, model.head))
    assert regions.layers[0]._orig_mod.linear.weight is model.layers[0].linear.weight
    assert has_compiled_regions(regions)
    assert extract_model_from_parallel(regions) is regions
    assert extract_model_from_parallel(regions, keep_torch_compile=False) is model
    inside: Any = extract_model_from_parallel(compile_regions(nn.DataParallel(model), backend="eager"))
    assert inside._orig_mod is model
    assert is_compiled_module(inside.head)
    torch.manual_seed(0)
    expected = model(torch.ones(1, 4))
    torch.manual_seed(0)
    assert torch.equal(regions(torch.ones(1, 4)), expected)
    assert is_compiled_module(compile_regions(nn.Linear(1, 1), backend="eager"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_regions_are_compiled_in_place_and_taken_back() -> None:
    model = Model().eval()
    expected, names = gradients(model), list(model.state_dict())

    assert compile_regions_in_place(model, backend="eager") is model
    assert list(model.state_dict()) == names
    parts = [name for name, part in model.named_modules() if part._compiled_call_impl is not None]
    assert parts == ["layers.0", "layers.1", "head"]
    assert has_compiled_regions(model)
    assert all(torch.allclose(a, b) for a, b in zip(gradients(model), expected, strict=True))
    bare = extract_model_from_parallel(model, keep_torch_compile=False)
    assert bare is model
    assert all(part._compiled_call_impl is None for part in model.modules())
    alone = nn.Linear(1, 1)
    assert compile_regions_in_place(alone, backend="eager")._compiled_call_impl is not None


@pytest.mark.parametrize(
    ("manifest", "given", "names"),
    [
        (FSDP2, None, (["compile blocks"], ["compile"])),
        (FSDP2, False, ([], ["compile"])),
        (FSDP2, True, (["compile"], [])),
        (DDP, None, ([], ["compile"])),
    ],
)
def test_the_backend_decides_what_is_compiled_where_the_settings_do_not(
    manifest: Manifest, given: bool | None, names: tuple[list[str], list[str]]
) -> None:
    config = TorchDynamoPlugin(backend="eager", use_regional_compilation=given)
    assert config.use_regional_compilation is bool(given)
    found = ordered([Compile(config), CompileBlocks(config)], manifest)
    assert tuple([transform.name for transform in phase] for phase in found) == names


def test_a_model_without_repeated_blocks_is_compiled_as_a_whole_by_default(context: Context) -> None:
    config = TorchDynamoPlugin(backend="eager")
    blocks, whole = CompileBlocks(config), Compile(config)
    plain = nn.Sequential(nn.Linear(1, 1))
    assert whole.apply(blocks.apply(plain, context), context)._orig_mod is plain
    repeated = nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]))
    assert whole.apply(blocks.apply(repeated, context), context) is repeated
    assert all(block._compiled_call_impl is not None for block in repeated[0])  # type: ignore[arg-type]


def test_settings_come_from_arguments_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TorchDynamoPlugin().to_kwargs() == {}
    assert TorchDynamoPlugin(backend="inductor", mode="max-autotune").to_kwargs() == {
        "backend": "inductor",
        "mode": "max-autotune",
    }
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "eager")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    found = TorchDynamoPlugin()
    assert found.backend is DynamoBackend.EAGER
    assert found.use_regional_compilation
    assert found.to_kwargs() == {"backend": "eager"}
    assert TorchDynamoPlugin(backend="no").backend is DynamoBackend.NO


@pytest.mark.parametrize("options", [{"backend": "zzz"}, {"mode": "fast"}, {"mode": "max-autotune", "options": {}}])
def test_settings_that_do_not_exist_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        TorchDynamoPlugin(**options)


# ------------------------------------------------------------------------------ order


class Named(Transform):
    def __init__(self, name: str, stage: Stage, before: bool = True) -> None:
        self.name, self.stage, self._before = name, stage, before  # type: ignore[misc]

    def before_wrap(self, manifest: Any) -> bool:
        return self._before

    def apply(self, model: nn.Module, context: Context) -> nn.Module:
        return model


def test_transforms_are_sorted_once_by_wrap_and_stage() -> None:
    whole = Compile(TorchDynamoPlugin(backend="eager"))
    split = Named("split", Stage.SPLIT_WEIGHTS)
    late = Named("late", Stage.SPLIT_INPUTS, before=False)
    recompute = ActivationCheckpoint()

    assert ordered([whole, late, recompute, split], MANIFEST) == ([split, recompute], [late, whole])
    early = dataclasses.replace(MANIFEST, capabilities=Capabilities(compile_before_wrap=True))
    assert ordered([whole, recompute], early) == ([recompute, whole], [])
    regional = Compile(TorchDynamoPlugin(backend="eager", use_regional_compilation=True))
    assert ordered([regional, recompute], MANIFEST) == ([recompute, regional], [])
