from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from accel_plugins import AcceleratedOptimizer
from accel_plugins.precision import GradScalerKwargs, choose
from accel_state.devices.select import family_of
from accel_state.gradient import GradientAccumulationPlugin, GradientState
from accel_testing.fresh import fresh


@pytest.fixture
def gradient() -> GradientState:
    with fresh():
        return GradientState.of(GradientAccumulationPlugin())


def pair(gradient: GradientState, **options: object) -> tuple[nn.Linear, AcceleratedOptimizer]:
    model = nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    return model, AcceleratedOptimizer(inner, gradient=gradient, **options)  # type: ignore[arg-type]


def test_it_is_a_real_optimizer_and_shows_the_state_of_the_one_inside(gradient: GradientState) -> None:
    _, optimizer = pair(gradient)

    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
    assert optimizer.defaults["momentum"] == 0.9
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.5
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


def test_it_acts_only_when_gradients_are_synchronised(gradient: GradientState) -> None:
    model, optimizer = pair(gradient)
    before = model.bias.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    gradient.sync_gradients = False
    optimizer.step()
    optimizer.zero_grad()

    assert torch.equal(model.bias, before)
    assert model.bias.grad is not None
    gradient.sync_gradients = True
    optimizer.step()
    assert torch.equal(model.bias, before - 1)
    optimizer.zero_grad(set_to_none=False)
    assert model.bias.grad.abs().sum() == 0
    optimizer.zero_grad()
    assert model.bias.grad is None


def test_a_closure_is_called_and_its_first_loss_returned(gradient: GradientState) -> None:
    model = nn.Linear(1, 1)
    optimizer = AcceleratedOptimizer(torch.optim.LBFGS(model.parameters(), max_iter=3), gradient=gradient)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 1)) - 3).square().sum()
        loss.backward()
        losses.append(loss)
        return loss

    assert optimizer.step(closure) is losses[0]
    assert len(losses) > 1
    assert losses[-1] < losses[0]


def test_an_overflow_is_a_skipped_step(gradient: GradientState) -> None:
    precision = choose("fp16", family_of("cpu"), [GradScalerKwargs(init_scale=4.0)])
    model, optimizer = pair(gradient, precision=precision)
    for bad in (True, False):
        precision.backward_scale(model(torch.ones(1, 2)).sum()).backward()
        if bad:
            model.bias.grad[0] = float("nan")
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped is bad


def test_without_a_strategy_a_given_scaler_is_stepped_and_updated(gradient: GradientState) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer = pair(gradient, scaler=scaler)
    before = model.bias.detach().clone()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    optimizer.step()

    assert torch.equal(model.bias, before - 1)
    assert not optimizer.step_was_skipped
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    model.bias.grad[0] = float("inf")
    optimizer.step()
    assert optimizer.step_was_skipped
    assert scaler.get_scale() == 2


def test_state_dict_of_a_wrapped_optimizer_is_loaded_again(gradient: GradientState) -> None:
    model, optimizer = pair(gradient)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    other = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), gradient=gradient)
    other.load_state_dict(optimizer.state_dict())

    assert other.param_groups[0]["lr"] == 1.0
    assert torch.equal(other.state[model.bias]["momentum_buffer"], optimizer.state[model.bias]["momentum_buffer"])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(optimizer.optimizer.param_groups) == 2


def test_it_survives_copying_and_hooks_reach_the_one_inside(gradient: GradientState) -> None:
    model, optimizer = pair(gradient)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(True))
    optimizer.step()
    shallow = copy.copy(optimizer)

    assert called == [True]
    assert shallow.optimizer is optimizer.optimizer
    assert "SGD" in repr(optimizer)
    read = pickle.loads(pickle.dumps(torch.optim.SGD(model.parameters(), lr=1.0)))
    assert AcceleratedOptimizer(read, gradient=gradient).defaults["lr"] == 1.0


def test_optimizers_with_modes_are_switched(gradient: GradientState) -> None:
    class Averaging(torch.optim.SGD):
        mode = ""

        def train(self) -> None:
            self.mode = "train"

        def eval(self) -> None:
            self.mode = "eval"

    model = nn.Linear(1, 1)
    inner = Averaging(model.parameters(), lr=0.1)
    optimizer = AcceleratedOptimizer(inner, gradient=gradient)
    optimizer.train()
    assert inner.mode == "train"
    optimizer.eval()
    assert inner.mode == "eval"
    AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), gradient=gradient).eval()


def test_alone_it_follows_the_gradient_state_made_last() -> None:
    with fresh():
        state = GradientState()
        model = nn.Linear(1, 1)
        optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        state.sync_gradients = False
        assert not optimizer.gradient_state.sync_gradients
