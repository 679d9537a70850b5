from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from accel_plugins import Bundle, Context, Manifest, Strategy, extract_model_from_parallel, is_compiled_module, order
from accel_plugins.layers import backend_of, record_layer, strategy_model
from accel_plugins.precision import choose
from accel_plugins.single.manifest import MANIFEST as SINGLE
from accel_plugins.transforms.compile import Compile
from accel_plugins.transforms.config import TorchDynamoPlugin
from accel_state import PartialState, current
from accel_state.devices.select import family_of
from accel_state.errors import Conflict
from accel_state.gradient import GradientState


class Engine(nn.Module):
    """The layer that a transform put around a model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.engine_of = inner
        record_layer(self, inner)


class HasModule(nn.Module):
    """Its `module` is a part of it, not something it is around."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(1, 1)


def test_wrappers_are_taken_off_whatever_their_order() -> None:
    model = nn.Linear(1, 1)

    assert extract_model_from_parallel(model) is model
    assert extract_model_from_parallel(DataParallel(Engine(model))) is model
    assert extract_model_from_parallel(HasModule()).module is not None


def test_a_compiled_model_stays_compiled_or_not_and_the_prepared_one_works_on() -> None:
    model = nn.Linear(1, 1)
    prepared = torch.compile(Engine(model), backend="eager")
    kept = extract_model_from_parallel(prepared)

    assert is_compiled_module(kept)
    assert kept._orig_mod is model
    assert isinstance(prepared._orig_mod, Engine)
    assert extract_model_from_parallel(prepared, keep_torch_compile=False) is model
    inside = torch.compile(model, backend="eager")
    assert extract_model_from_parallel(Engine(inside)) is inside
    assert torch.equal(kept(torch.ones(1)), model(torch.ones(1)))


def test_the_autocasting_forward_is_kept_or_taken_off() -> None:
    model = choose("bf16", family_of("cpu")).prepare(nn.Linear(1, 1))
    engine = Engine(model)

    assert "forward" in vars(extract_model_from_parallel(engine))
    assert "forward" not in vars(extract_model_from_parallel(engine, keep_fp32_wrapper=False))


def test_wrappers_inside_a_model_are_taken_out_when_asked() -> None:
    inner, deep = nn.Linear(1, 1), nn.Linear(1, 1)
    model = nn.Sequential(Engine(inner), nn.Sequential(Engine(Engine(deep))))
    extract_model_from_parallel(model)
    assert isinstance(model[0], Engine)
    extract_model_from_parallel(model, recursive=True)

    assert model[0] is inner
    assert model[1][0] is deep


class Wrapper(nn.Module):
    """One that nobody but its strategy knows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.content = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.content(inputs)
        return outputs


class Wrapping(Strategy):
    def setup(self, bundle: Bundle) -> Bundle:
        bundle.models = [Wrapper(model) for model in bundle.models]
        return bundle

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.content if isinstance(model, Wrapper) else model  # type: ignore[return-value]


@pytest.fixture
def strategy(cpu_state: PartialState) -> Wrapping:
    process = current.process()
    return Wrapping(Context(process, GradientState(), choose("no", process.family)))


MANIFEST = Manifest(name="wrapping", config="", strategy="wrapping.strategy:Wrapping")


def prepared(strategy: Strategy, model: nn.Module, *transforms: Compile) -> nn.Module:
    bundle = Bundle.of([model])
    for step in order.steps(MANIFEST, strategy, transforms):
        bundle = step.run(bundle)
    return bundle.models[0]


def test_the_strategy_takes_off_a_wrapper_that_only_it_knows(strategy: Wrapping) -> None:
    model = nn.Linear(1, 1)
    made = prepared(strategy, model)

    assert isinstance(made, Wrapper)
    assert extract_model_from_parallel(made) is model
    holder = nn.Sequential(made)
    extract_model_from_parallel(holder, recursive=True)
    assert holder[0] is model


def test_a_strategy_is_asked_about_the_model_inside_a_compiled_one(strategy: Wrapping) -> None:
    model = nn.Linear(1, 1)
    compiled = prepared(strategy, model, Compile(TorchDynamoPlugin(backend="eager")))
    made = strategy_model(compiled)

    assert is_compiled_module(compiled)
    assert isinstance(made, Wrapper)
    assert strategy_model(made) is made
    assert strategy_model(torch.compile(made, backend="eager")) is made
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    kept = extract_model_from_parallel(compiled)
    assert is_compiled_module(kept)
    assert kept._orig_mod is model


def test_a_model_that_no_strategy_made_stays_as_it_is() -> None:
    model = nn.Linear(1, 1)
    compiled = torch.compile(model, backend="eager")
    assert strategy_model(model) is model
    assert strategy_model(compiled) is compiled


def test_a_model_that_was_compiled_first_is_what_a_strategy_without_a_wrapper_makes(strategy: Wrapping) -> None:
    plain = Strategy(strategy.context)
    compiled = torch.compile(nn.Linear(1, 1), backend="eager")
    assert strategy_model(prepared(plain, compiled)) is compiled


def test_the_model_that_was_prepared_by_one_backend_is_refused_by_another(strategy: Wrapping) -> None:
    model = prepared(strategy, nn.Linear(1, 1), Compile(TorchDynamoPlugin(backend="eager")))
    assert backend_of(model) == "wrapping"
    assert backend_of(nn.Linear(1, 1)) is None

    order.check_bundle(MANIFEST, strategy, [], Bundle.of([model]))
    with pytest.raises(Conflict, match="'wrapping' prepared it earlier") as caught:
        order.check_bundle(SINGLE, Strategy(strategy.context), [], Bundle.of([model]))
    assert caught.value.remedy


def test_what_is_inside_a_model_is_known_after_its_strategy_is_gone(strategy: Wrapping) -> None:
    model = nn.Linear(1, 1)
    made = prepared(Wrapping(strategy.context), model)
    gc.collect()
    assert extract_model_from_parallel(made) is model
