"""Settings of training in 8 bits, the choice of a library, and the contracts with those that need a GPU.

A package with the interface of Transformer Engine replaces it; its layers compute in full precision.
Where `ACCEL_TRANSFORMER_ENGINE_WHEELS` names wheels, as `nox -s float8` has them, their text is compared with it.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import inspect
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_bigmodel.hooks import ModelHook, add_hook_to_module
from accel_plugins import Bundle, Context
from accel_plugins.manifest import Capabilities
from accel_plugins.order import check_bundle, steps
from accel_plugins.precision import choose
from accel_plugins.precision.config import (
    AORecipeKwargs,
    FP8BackendType,
    FP8RecipeKwargs,
    FP8Settings,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from accel_plugins.resolve import build
from accel_plugins.single.manifest import MANIFEST
from accel_state import PartialState, current
from accel_state.errors import Conflict, Missing, NotOffered, SettingError
from accel_state.gradient import GradientState
from accel_state.settings.environ import Given, to_environment
from accel_state.settings.schema import settings_of

pytestmark = pytest.mark.usefixtures("fresh_state")


ENGINE = """
import contextlib
import torch

entered = []

class Linear(torch.nn.Module):
    def __init__(self, in_features, out_features, bias=True, params_dtype=None):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = torch.nn.Parameter(torch.zeros(out_features, in_features, dtype=params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype)) if bias else torch.Tensor()

    def forward(self, inputs):
        return torch.nn.functional.linear(inputs, self.weight, self.bias if self.bias.numel() else None)

class LayerNorm(torch.nn.LayerNorm):
    def __init__(self, normalized_shape, eps=1e-5, params_dtype=None):
        super().__init__(normalized_shape, eps=eps, dtype=params_dtype)

class TransformerLayer(torch.nn.Module):
    pass

@contextlib.contextmanager
def autocast(enabled=True, recipe=None):
    entered.append((enabled, recipe))
    yield
"""
RECIPE = """
import enum

class Format(enum.Enum):
    E4M3 = 1
    E5M2 = 2
    HYBRID = 3

class DelayedScaling:
    def __init__(self, margin, fp8_format, amax_history_len, amax_compute_algo):
        self.given = dict(vars())

class MXFP8BlockScaling:
    def __init__(self, margin, fp8_format):
        self.given = dict(vars())
"""


@pytest.fixture
def vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Puts a package on the path and gives its main module."""
    packages = {
        "transformer_engine": {"pytorch/__init__.py": ENGINE, "common/__init__.py": "", "common/recipe.py": RECIPE},
    }

    def install(name: str) -> Any:
        for file, source in {"__init__.py": "", **packages[name]}.items():
            target = tmp_path / name / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source)
        importlib.invalidate_caches()
        return importlib.import_module(f"{name}.pytorch" if name == "transformer_engine" else name)

    monkeypatch.syspath_prepend(str(tmp_path))
    yield install
    for module in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[module]


def fp8(*handlers: object) -> Any:
    PartialState(cpu=True)
    return choose("fp8", current.process().family, handlers)


# --------------------------------------------------------------------------- settings


def test_defaults_are_those_of_the_libraries() -> None:
    engine = TERecipeKwargs()

    assert (engine.margin, engine.interval, engine.fp8_format) == (0, 1, "HYBRID")
    assert (engine.amax_history_len, engine.amax_compute_algo) == (1024, "most_recent")
    assert engine.override_linear_precision == (False, False, False)
    assert (engine.use_autocast_during_eval, engine.use_mxfp8_block_scaling) == (False, False)
    assert MSAMPRecipeKwargs().opt_level == "O2"
    assert (AORecipeKwargs().pad_inner_dim, AORecipeKwargs().enable_fsdp_float8_all_gather) == (True, True)
    assert [str(member) for member in FP8BackendType] == ["NO", "TE", "MSAMP", "AO"]
    assert "ao" not in FP8BackendType


def test_fp8_recipes_are_filled_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "FORMAT": "e4m3",
        "MARGIN": "2",
        "AMAX_COMPUTE_ALGO": "max",
        "OVERRIDE_DGRAD": "true",
        "OPT_LEVEL": "O1",
        "PAD_INNER_DIM": "false",
        "BACKEND": "te",
    }.items():
        monkeypatch.setenv(f"ACCELERATE_FP8_{name}", value)
    both = FP8RecipeKwargs(margin=3)

    assert (both.fp8_format, both.margin, both.amax_compute_algo) == ("E4M3", 3, "max")
    assert both.override_linear_precision == (False, True, False)
    assert (both.opt_level, both.backend) == ("O1", "TE")
    assert AORecipeKwargs().pad_inner_dim is False
    assert both.to_dict()["backend"] == "TE"
    assert TERecipeKwargs(fp8_format="e5m2").to_kwargs()["fp8_format"] == "E5M2"  # type: ignore[arg-type]
    assert MSAMPRecipeKwargs().to_kwargs() == {"opt_level": "O1"}


@pytest.mark.parametrize("recipe", [TERecipeKwargs, MSAMPRecipeKwargs, AORecipeKwargs])
def test_a_recipe_that_nobody_changed_has_no_arguments(recipe: type[Any]) -> None:
    assert recipe().to_kwargs() == {}


def test_what_a_launcher_passes_on_is_what_a_recipe_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"backend": "msamp", "margin": 4, "format": "E5M2", "use_autocast_during_eval": True, "opt_level": "O1"}
    three = {"override_linear_precision": Given((True, False, True), "argument")}
    for name, value in {**to_environment(FP8Settings(**said)), **FP8Settings.further_variables(three)}.items():
        monkeypatch.setenv(name, value)
    both = FP8RecipeKwargs()

    assert (both.backend, both.margin, both.fp8_format, both.opt_level) == ("MSAMP", 4, "E5M2", "O1")
    assert both.use_autocast_during_eval is True
    assert both.override_linear_precision == (True, False, True)


def test_every_setting_of_a_launcher_belongs_to_a_recipe() -> None:
    recipes = (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs)
    read = {known.variable for recipe in recipes for known in settings_of(recipe).values()}

    assert {known.variable for known in settings_of(FP8Settings).values()} - read == {"ACCELERATE_FP8_BACKEND", None}


def test_a_library_in_the_first_place_is_the_backend() -> None:
    given: Any = "MSAMP"
    first = FP8RecipeKwargs(given)

    assert (first.backend, first.opt_level) == ("MSAMP", "O2")
    assert FP8RecipeKwargs().backend == "TE"


@pytest.mark.parametrize(
    "make",
    [
        lambda: TERecipeKwargs(fp8_format="E3M4"),  # type: ignore[arg-type]
        lambda: TERecipeKwargs(amax_compute_algo="mean"),  # type: ignore[arg-type]
        lambda: TERecipeKwargs(override_linear_precision=(True, False)),  # type: ignore[arg-type]
        lambda: MSAMPRecipeKwargs(opt_level="O9"),  # type: ignore[arg-type]
        lambda: FP8RecipeKwargs(backend="AO"),  # type: ignore[arg-type]
    ],
)
def test_values_that_do_not_exist_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(SettingError):
        make()


# ----------------------------------------------------------------------------- choice


def test_a_library_that_is_not_installed_is_named() -> None:
    with pytest.raises(Missing, match=r"transformer.engine") as caught:
        fp8(TERecipeKwargs())
    assert isinstance(caught.value, ImportError)


@pytest.mark.parametrize("recipe", [MSAMPRecipeKwargs(), FP8RecipeKwargs(backend="MSAMP")])
def test_ms_amp_is_refused_and_the_error_names_other_recipes(recipe: object) -> None:
    with pytest.raises(NotOffered, match=r"(?s)with MS-AMP.*not on any package index.*AORecipeKwargs"):
        fp8(recipe)


def test_a_recipe_says_which_library(vendor: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    vendor("transformer_engine")
    assert fp8(TERecipeKwargs()).library is FP8BackendType.TE
    assert fp8(FP8RecipeKwargs(backend="TE")).library is FP8BackendType.TE
    assert fp8().library is FP8BackendType.TE
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "msamp")
    with pytest.raises(NotOffered, match="MS-AMP"):
        fp8()
    with pytest.raises(Conflict, match="TERecipeKwargs and MSAMPRecipeKwargs"):
        fp8(TERecipeKwargs(), MSAMPRecipeKwargs())


# ------------------------------------------------------------------ Transformer Engine


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32, eps=1e-3), nn.Linear(32, 16, bias=False))
        self.odd = nn.Linear(16, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.odd(self.inner(inputs))
        return out


def prepared(model: nn.Module, *handlers: object) -> Bundle:
    """The model and its optimizer after the steps of `prepare`."""
    PartialState(cpu=True)
    process = current.process()
    strategy = build(MANIFEST, None, Context(process, GradientState(), choose("fp8", process.family, handlers)))
    bundle = Bundle.of([model, torch.optim.SGD(model.parameters(), lr=0.1)])
    check_bundle(MANIFEST, strategy, (), bundle)
    for step in steps(MANIFEST, strategy):
        bundle = step.run(bundle)
    return bundle


def test_layers_are_exchanged_with_their_weights_and_the_optimizer_follows(vendor: Callable[[str], Any]) -> None:
    engine = vendor("transformer_engine")
    model = Model()
    expected = Model()(torch.ones(2, 16))
    bundle = prepared(model, TERecipeKwargs())

    kinds = [type(part) for part in (*model.inner, model.odd)]
    assert kinds == [engine.Linear, engine.LayerNorm, engine.Linear, nn.Linear]
    assert model.inner[1].eps == 1e-3
    assert {id(p) for p in bundle.optimizers[0].param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    assert torch.allclose(model(torch.ones(2, 16)), expected, atol=0.02)


def test_layers_can_be_exchanged_back(vendor: Callable[[str], Any]) -> None:
    vendor("transformer_engine")
    from accel_plugins.precision.fp8 import convert_model, has_transformer_engine_layers

    model, expected = Model(), Model()(torch.ones(2, 16))
    with torch.no_grad():
        convert_model(model, _convert_ln=False)
        assert has_transformer_engine_layers(model)
        assert type(model.inner[1]) is nn.LayerNorm
        convert_model(model, to_transformer_engine=False)
    assert not has_transformer_engine_layers(model)
    assert [type(part) for part in model.inner] == [nn.Linear, nn.LayerNorm, nn.Linear]
    assert torch.equal(model(torch.ones(2, 16)), expected)


@pytest.mark.parametrize("in_evaluation", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_forward_computes_by_the_recipe(vendor: Callable[[str], Any], in_evaluation: bool, blocks: bool) -> None:
    engine = vendor("transformer_engine")
    handler = TERecipeKwargs(
        use_autocast_during_eval=in_evaluation, use_mxfp8_block_scaling=blocks, margin=1, fp8_format="E4M3"
    )
    model = prepared(Model(), handler).models[0]
    model(torch.ones(2, 16))
    model.eval()(torch.ones(2, 16))

    assert [enabled for enabled, _ in engine.entered] == [True, in_evaluation]
    recipe = engine.entered[0][1]
    assert type(recipe).__name__ == ("MXFP8BlockScaling" if blocks else "DelayedScaling")
    assert (recipe.given["margin"], recipe.given["fp8_format"].name) == (1, "E4M3")
    if not blocks:
        assert recipe.given["amax_history_len"] == 1024


def test_a_forward_with_a_hook_computes_by_the_recipe_and_so_does_a_copy(vendor: Callable[[str], Any]) -> None:
    engine = vendor("transformer_engine")
    model, expected = add_hook_to_module(Model(), ModelHook()), Model()(torch.ones(2, 16))
    prepared(model, TERecipeKwargs())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.odd.weight.zero_()

    assert torch.allclose(copied(torch.ones(2, 16)), expected, atol=0.02)
    assert [enabled for enabled, _ in engine.entered] == [True]


def test_older_releases_have_the_region_by_another_name(
    vendor: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = vendor("transformer_engine")
    region = engine.autocast
    monkeypatch.delattr(engine, "autocast")
    monkeypatch.setattr(
        engine, "fp8_autocast", lambda enabled, fp8_recipe: region(enabled=enabled, recipe=fp8_recipe), raising=False
    )
    prepared(Model(), TERecipeKwargs()).models[0](torch.ones(2, 16))

    assert [enabled for enabled, _ in engine.entered] == [True]


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (TERecipeKwargs(override_linear_precision=(False, False, True)), "removed this option in version 2.2"),
        (TERecipeKwargs(fp8_format="E5M2"), "does not support E5M2 in forward"),
    ],
)
def test_what_releases_do_not_have_is_refused_before_anything_changes(
    vendor: Callable[[str], Any], handler: TERecipeKwargs, said: str
) -> None:
    vendor("transformer_engine")
    model = Model()
    with pytest.raises(NotOffered, match=said):
        prepared(model, handler)
    assert type(model.inner[0]) is nn.Linear


def test_an_interval_is_said_to_have_no_effect(vendor: Callable[[str], Any]) -> None:
    vendor("transformer_engine")
    with pytest.warns(UserWarning, match="interval=4 has no effect"):
        fp8(TERecipeKwargs(interval=4))


def test_layers_stay_whose_exchange_would_change_the_model(vendor: Callable[[str], Any]) -> None:
    engine = vendor("transformer_engine")
    from accel_plugins.precision.fp8 import convert_model

    model = nn.Module()
    model.words, model.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
    model.head.weight = model.words.weight
    model.first = model.again = nn.Linear(16, 16)
    model.bare, model.free = nn.LayerNorm(16, elementwise_affine=False), nn.LayerNorm(16, bias=False)
    model.inner = nn.Sequential(nn.Linear(16, 16))
    with torch.no_grad():
        convert_model(model)

    assert model.head.weight is model.words.weight
    assert model.first is model.again
    assert [type(part) for part in (model.bare, model.free)] == [nn.LayerNorm] * 2
    assert type(model.inner[0]) is engine.Linear


def test_without_autocast_nothing_computes_in_8_bits(vendor: Callable[[str], Any]) -> None:
    engine = vendor("transformer_engine")
    prepared(Model(), FP8RecipeKwargs(backend="TE", use_autocast=False)).models[0](torch.ones(2, 16))
    assert engine.entered == []


def test_a_model_without_layers_to_exchange_is_refused(vendor: Callable[[str], Any]) -> None:
    vendor("transformer_engine")
    with pytest.raises(SettingError, match="no layer norm"):
        prepared(nn.Sequential(nn.Linear(3, 3)), TERecipeKwargs())


@pytest.mark.parametrize(
    ("name", "handlers", "exchanges"),
    [("fp8", [TERecipeKwargs()], True), ("bf16", [], False)],
)
def test_layers_are_exchanged_also_where_an_engine_keeps_the_precision(
    vendor: Callable[[str], Any], name: str, handlers: list[object], exchanges: bool
) -> None:
    vendor("transformer_engine")
    PartialState(cpu=True)
    process = current.process()
    strategy = build(MANIFEST, None, Context(process, GradientState(), choose(name, process.family, handlers)))
    owning = dataclasses.replace(MANIFEST, capabilities=Capabilities(own_precision=True))

    assert (f"precision {name}" in [step.name for step in steps(owning, strategy)]) is exchanges


# By what stands in: files of a release of which one has it, and its name there.
CONTRACT = {
    "pytorch:Linear": (("pytorch/module/linear.py",), "Linear"),
    "pytorch:LayerNorm": (("pytorch/module/layernorm.py",), "LayerNorm"),
    "pytorch:autocast": (("pytorch/quantization.py",), "autocast"),
    "common.recipe:DelayedScaling": (("common/recipe/__init__.py",), "DelayedScaling"),
    "common.recipe:MXFP8BlockScaling": (("common/recipe/__init__.py",), "MXFP8BlockScaling"),
}
OLDER = (("pytorch/fp8.py",), "fp8_autocast")
WHEELS = [Path(path) for path in os.environ.get("ACCEL_TRANSFORMER_ENGINE_WHEELS", "").split(os.pathsep) if path]
released = pytest.mark.skipif(not WHEELS, reason="needs wheels of Transformer Engine: see `nox -s float8`")


def module_of(wheel: Path, file: str) -> ast.Module:
    with zipfile.ZipFile(wheel) as archive:
        name = f"transformer_engine/{file}"
        return ast.parse(archive.read(name) if name in archive.namelist() else "")


def parameters_in(wheel: Path, files: tuple[str, ...], name: str) -> dict[str, bool]:
    """By parameter of a function or class of a release, whether it has to be given."""
    nodes = [node for file in files for node in module_of(wheel, file).body if getattr(node, "name", None) == name]
    (node,) = nodes
    if isinstance(node, ast.ClassDef):
        made = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        if not made:
            fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            return {ast.unparse(field.target): field.value is None for field in fields}
        (node,) = made
    assert isinstance(node, ast.FunctionDef)
    told = [*node.args.posonlyargs, *node.args.args]
    required = len(told) - len(node.args.defaults)
    found = {argument.arg: place < required for place, argument in enumerate(told) if argument.arg != "self"}
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return found | {argument.arg: default is None for argument, default in pairs}


@released
@pytest.mark.parametrize("wheel", WHEELS, ids=lambda path: path.name.split("-")[1])
@pytest.mark.parametrize("standing", CONTRACT)
def test_what_stands_in_takes_nothing_that_a_release_does_not(
    vendor: Callable[[str], Any], standing: str, wheel: Path
) -> None:
    vendor("transformer_engine")
    place, _, name = standing.partition(":")
    own = set(inspect.signature(getattr(importlib.import_module(f"transformer_engine.{place}"), name)).parameters)
    files, there = CONTRACT[standing]
    if name == "autocast" and not module_of(wheel, files[0]).body:
        own, (files, there) = {"enabled", "fp8_recipe"}, OLDER
    known = parameters_in(wheel, files, there)

    assert own <= known.keys()
    assert {parameter for parameter, required in known.items() if required} <= own


@released
@pytest.mark.parametrize("wheel", WHEELS, ids=lambda path: path.name.split("-")[1])
def test_a_release_has_the_names_that_are_read(wheel: Path) -> None:
    imported = {
        alias.name
        for node in ast.walk(module_of(wheel, "pytorch/__init__.py"))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {"Linear", "LayerNorm", "TransformerLayer"} <= imported
    assert imported & {"autocast", "fp8_autocast"}
    recipes = module_of(wheel, "common/recipe/__init__.py").body
    (formats,) = [node for node in recipes if isinstance(node, ast.ClassDef) and node.name == "Format"]
    assert {"E4M3", "HYBRID"} <= {ast.unparse(node.targets[0]) for node in formats.body if isinstance(node, ast.Assign)}
    kept = {
        ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
        for file in ("pytorch/module/linear.py", "pytorch/ops/basic/layer_norm.py")
        for node in ast.walk(module_of(wheel, file))
        if isinstance(node, (ast.Assign, ast.AnnAssign))
    }
    assert {"self.in_features", "self.out_features", "self.eps"} <= kept
