from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from accel_bigmodel import init_empty_weights, init_on_device
from accel_state.errors import SettingError


class Own(nn.Parameter):
    pass


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.scale = Own(torch.ones(2), requires_grad=False)
        self.scale.note = "kept"
        self.register_parameter("none", None)
        self.register_buffer("positions", torch.arange(3))


def test_parameters_have_no_memory_and_buffers_do() -> None:
    with init_empty_weights():
        model = Tied()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.positions.is_meta
    assert model.head.weight is model.embed.weight
    assert type(model.scale) is Own
    assert model.scale.note == "kept"
    assert not model.scale.requires_grad
    assert model.none is None
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize("variable", [None, "1"])
def test_buffers_go_along_when_asked_or_by_the_variable(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    if variable:
        monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", variable)
    with init_empty_weights(include_buffers=None if variable else True):
        model = nn.BatchNorm1d(4)
    assert model.running_mean.is_meta
    assert model.weight.is_meta


def test_with_buffers_the_methods_of_modules_are_not_replaced() -> None:
    before = (nn.Module.register_parameter, nn.Module.register_buffer)
    with init_empty_weights(include_buffers=True):
        assert (nn.Module.register_parameter, nn.Module.register_buffer) == before
        with init_on_device("cpu", include_buffers=True):
            inner = nn.BatchNorm1d(2)
        outer = nn.BatchNorm1d(2)
    assert (nn.Module.register_parameter, nn.Module.register_buffer) == before
    assert outer.weight.is_meta
    assert not inner.weight.is_meta


def test_a_variable_that_is_no_truth_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "perhaps")
    with pytest.raises(SettingError, match="ACCELERATE_INIT_INCLUDE_BUFFERS"), init_empty_weights():
        pass


def test_an_error_inside_leaves_nothing_behind() -> None:
    before = nn.Module.register_parameter
    with pytest.raises(RuntimeError, match="inside"), init_empty_weights():
        raise RuntimeError("inside")
    assert nn.Module.register_parameter is before


def test_the_inner_of_two_wins_and_the_outer_comes_back() -> None:
    with init_empty_weights():
        with init_on_device("cpu"):
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    assert not inner.weight.is_meta
    assert outer.weight.is_meta


def test_other_threads_see_no_difference() -> None:
    inside, done = threading.Event(), threading.Event()
    made: list[nn.Linear] = []

    def other() -> None:
        inside.wait(250)
        made.append(nn.Linear(2, 2))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with init_empty_weights():
        inside.set()
        assert done.wait(250)
    thread.join()
    assert not made[0].weight.is_meta


def test_what_another_library_replaced_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = nn.Module.register_parameter, []

    def theirs(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        seen.append(name)
        original(module, name, param)

    monkeypatch.setattr(nn.Module, "register_parameter", theirs)
    with init_empty_weights():
        assert nn.Linear(2, 2).weight.is_meta
    assert nn.Module.register_parameter is theirs
    nn.Linear(2, 2)
    assert seen == ["weight", "bias"] * 2


def test_what_another_library_replaces_inside_stays() -> None:
    before, seen = nn.Module.register_parameter, []
    with init_empty_weights():
        below = nn.Module.register_parameter

        def theirs(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            seen.append(name)
            below(module, name, param)

        nn.Module.register_parameter = theirs  # type: ignore[method-assign]
        assert nn.Linear(2, 2).weight.is_meta
    try:
        assert nn.Module.register_parameter is theirs
        assert not nn.Linear(2, 2).weight.is_meta
        with init_empty_weights():
            assert nn.Linear(2, 2).weight.is_meta
        assert nn.Module.register_parameter is theirs
        assert seen == ["weight", "bias"] * 3
    finally:
        nn.Module.register_parameter = before  # type: ignore[method-assign]
