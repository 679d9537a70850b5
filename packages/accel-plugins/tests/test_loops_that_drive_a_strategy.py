"""A loop that uses a prepared optimizer drives a strategy completely, with or without an Accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_plugins import AcceleratedOptimizer, Bundle, Context, Manifest, Precision, Strategy
from accel_plugins import order as prepare_order
from accel_state import PartialState
from accel_state.current import process
from accel_state.gradient import GradientState


class LateMean(Strategy):
    """Averages gradients when they are finalised, and writes down which calls it received."""

    def __init__(self, context: Context, config: Any = None) -> None:
        super().__init__(context, config)
        self.calls: list[Any] = []

    def finalize_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append(("finalize_gradients", optimizer))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.context.process.transport.all_reduce(parameter.grad).wait()
                parameter.grad /= self.context.process.world_size

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> bool:
        self.calls.append(("step", optimizer))
        return super().step(optimizer, closure)

    def after_step(self, model: nn.Module | None, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append(("after_step", model, optimizer))


MANIFEST = Manifest("late", strategy="of_this_test:LateMean", protocol=3)


def prepared() -> tuple[LateMean, nn.Linear, AcceleratedOptimizer]:
    PartialState(cpu=True)
    strategy = LateMean(Context(process(), GradientState(), Precision(), manifest=MANIFEST))
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    bundle = Bundle.of([model, torch.optim.SGD(model.parameters(), lr=0.1)])
    for step in prepare_order.steps(MANIFEST, strategy):
        bundle = step.run(bundle)
    return strategy, model, AcceleratedOptimizer(bundle.optimizers[0], strategy=strategy)


def trained() -> list[float]:
    _, model, optimizer = prepared()
    for _ in range(2):
        model(torch.tensor([[1.0 + process().rank, 2.0]])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [round(value, 6) for value in model.weight.flatten().tolist()]


def trained_by_closures() -> list[float]:
    _, model, optimizer = prepared()
    for _ in range(2):

        def compute() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.tensor([[1.0 + process().rank, 2.0]])).sum()
            loss.backward()
            return loss

        optimizer.step(compute)
    return [round(value, 6) for value in model.weight.flatten().tolist()]


@pytest.mark.parametrize("train", [trained, trained_by_closures])
def test_gradients_that_a_strategy_averages_late_are_averaged_before_a_step(two: Any, train: Any) -> None:
    assert two.run(train) == [[-0.3, -0.4]] * 2


def test_the_optimizer_makes_the_calls_around_a_step_in_order(fresh_state: None) -> None:
    strategy, model, optimizer = prepared()
    inner = optimizer.optimizer
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert strategy.calls == [("finalize_gradients", inner), ("step", inner), ("after_step", model, inner)]


def test_a_step_that_was_skipped_is_followed_by_nothing(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, model, optimizer = prepared()
    monkeypatch.setattr(strategy.context.precision, "step", lambda *_: False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.step_was_skipped
    assert [call[0] for call in strategy.calls] == ["finalize_gradients", "step"]


def test_an_optimizer_of_several_models_is_followed_without_a_model(fresh_state: None) -> None:
    strategy, model, _ = prepared()
    other = nn.Linear(2, 1)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    for parameter in (*model.parameters(), *other.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    AcceleratedOptimizer(both, strategy=strategy).step()
    assert strategy.calls[-1] == ("after_step", None, both)
