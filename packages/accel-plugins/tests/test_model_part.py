"""`ModelPart`: each process builds its layers, with the values of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_plugins import Context, ModelPart, Precision, Strategy
from accel_plugins.model_part import random_numbers_of_first
from accel_state import GradientState, PartialState
from accel_state.current import process
from accel_testing.processes import Processes

LAYERS = 5


def built(part: ModelPart) -> list[nn.Linear]:
    layers = []
    for number in range(LAYERS):
        with part.layer(number, LAYERS):
            layers.append(nn.Linear(3, 3))
    return layers


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_stages_have_all_layers_in_order_and_about_as_many_each(count: int) -> None:
    stages = [ModelPart(count=count).stage_of(number, LAYERS) for number in range(LAYERS)]
    assert stages == sorted(stages)
    sizes = [stages.count(stage) for stage in range(count)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("parts", [[[0], [1]], [[0, 2], [1, 3]]], ids=["two stages", "four stages of two processes"])
def test_parts_have_memory_for_their_layers_and_the_values_of_the_whole_model(parts: list[list[int]]) -> None:
    torch.manual_seed(7)
    whole, afterwards = built(ModelPart()), torch.rand(())
    count = sum(map(len, parts))
    in_memory = []
    for stages in parts:
        torch.manual_seed(7)
        layers = built(ModelPart(stages, count))
        assert torch.rand(()) == afterwards, "other parts of a model have the same values too"
        own = [number for number, layer in enumerate(layers) if not layer.weight.is_meta]
        assert all(torch.equal(layers[number].weight, whole[number].weight) for number in own)
        assert all(layer.weight.shape == (3, 3) for layer in layers)
        in_memory += own
    assert sorted(in_memory) == list(range(LAYERS))


def test_two_models_have_different_values() -> None:
    torch.manual_seed(7)
    first, second = built(ModelPart()), built(ModelPart())
    assert not torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[0].weight, first[1].weight)


def test_a_strategy_builds_the_whole_model_unless_it_says_otherwise() -> None:
    PartialState(cpu=True)
    strategy = Strategy(Context(process(), GradientState(), Precision()))
    with strategy.init_module() as part:
        layers = built(part)
    assert (part.stages, part.count) == ((0,), 1)
    assert not any(layer.weight.is_meta for layer in layers)


def draw(own_seed: int) -> tuple[float, float, float]:
    state = PartialState(cpu=True)
    torch.manual_seed(own_seed + state.process_index)
    with random_numbers_of_first():
        inside = torch.rand(()).item()
    after = torch.rand(()).item()
    torch.manual_seed(own_seed + state.process_index)
    return inside, after, torch.rand(()).item()


def test_processes_draw_the_numbers_of_the_first_and_then_their_own() -> None:
    with Processes(2) as group:
        first, second = group.run(draw, 3)
    assert first[0] == second[0] == first[2]
    assert second[1] == second[2]
    assert first[1] != second[1]
