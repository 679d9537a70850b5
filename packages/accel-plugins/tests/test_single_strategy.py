from __future__ import annotations

import pytest
import torch
from torch import nn

from accel_plugins import Bundle, Context, Shards, Strategy
from accel_plugins.precision import choose
from accel_plugins.single.strategy import SingleStrategy
from accel_state import PartialState, current
from accel_state.errors import Conflict
from accel_state.gradient import GradientState


@pytest.fixture
def strategy(cpu_state: PartialState) -> Strategy:
    process = current.process()
    return SingleStrategy(Context(process, GradientState(), choose("no", process.family)))


def test_one_process_trains_as_plain_torch_does(strategy: Strategy) -> None:
    model, plain = nn.Linear(2, 2), nn.Linear(2, 2)
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    bundle = Bundle.of([model, optimizers[0]])
    strategy.check(bundle)
    assert strategy.setup(bundle).in_given_order() == (model, optimizers[0])
    with strategy.no_sync(model), strategy.join([model]), strategy.sync_in_next_backward(model):
        strategy.backward(model(torch.ones(1, 2)).square().sum())
    plain(torch.ones(1, 2)).square().sum().backward()
    strategy.finalize_gradients(optimizers[0])
    norm = strategy.clip_norm(model.parameters(), 0.1)
    strategy.clip_value(model.parameters(), 0.05)
    assert norm == torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.nn.utils.clip_grad_value_(plain.parameters(), 0.05)

    assert strategy.step(optimizers[0])
    optimizers[1].step()
    assert torch.equal(model.weight, plain.weight)
    assert strategy.shards() == Shards(1, 0)
    assert strategy.unwrap(model) is model
    assert strategy.place(model) is model
    assert strategy.writes_weights()
    strategy.average_parameters(model)
    strategy.close()


def test_weights_go_out_and_in_under_the_users_names(strategy: Strategy) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager")
    weights = strategy.state_dict(compiled)
    strategy.load_weights(model, {name: torch.zeros_like(value) for name, value in weights.items()})

    assert set(weights) == {"0.weight", "0.bias"}
    assert model[0].weight.abs().sum() == 0


def test_it_refuses_a_run_of_several_processes(strategy: Strategy) -> None:
    class Crowded(type(strategy.context.process.transport)):  # type: ignore[misc]
        world_size = 2

    process = strategy.context.process._replace(transport=Crowded(torch.device("cpu")))
    crowded = SingleStrategy(strategy.context._replace(process=process))

    with pytest.raises(Conflict, match="2 processes"):
        crowded.check(Bundle())
