from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from accel_plugins import extract_model_from_parallel, is_compiled_module
from accel_plugins.precision import choose
from accel_plugins.wrapped.unwrap import wrapped_module
from accel_state.devices.select import family_of


class Engine(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.engine_of = inner


class HasModule(nn.Module):
    """Its `module` is a part of it, not something it is around."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(1, 1)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    wrapped_module.register(Engine)(lambda engine: engine.engine_of)
    return


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
