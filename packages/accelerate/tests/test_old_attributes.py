"""Attributes of states that scripts and test suites read and reset."""

from __future__ import annotations

import pytest
import torch

from accel_testing.processes import Processes
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState, is_initialized

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_shared_states_are_empty_until_one_is_made_and_after_a_reset() -> None:
    assert PartialState._shared_state == {}
    assert AcceleratorState._shared_state == {}
    accelerator = Accelerator(cpu=True)
    assert PartialState._shared_state["num_processes"] == accelerator.num_processes
    assert AcceleratorState._shared_state["mixed_precision"] == "no"
    AcceleratorState._reset_state()
    assert AcceleratorState._shared_state == {}
    assert PartialState._shared_state != {}
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}


@pytest.mark.parametrize("cleared", [GradientState, AcceleratorState, PartialState])
def test_a_cleared_shared_state_ends_that_state_and_those_above_it(cleared: type) -> None:
    states = (GradientState, AcceleratorState, PartialState)
    assert [len(state._shared_state) for state in states] == [0, 0, 0]
    Accelerator(cpu=True, mixed_precision="bf16")
    assert all(state._shared_state for state in states)
    assert GradientState()._shared_state["sync_gradients"] is True
    cleared._shared_state.clear()
    ended = states if cleared is PartialState else (cleared,)
    assert [state for state in states if not state._shared_state] == list(ended)
    if AcceleratorState in ended:
        assert Accelerator(cpu=True).mixed_precision == "no"


def test_another_precision_after_a_reset() -> None:
    assert not is_initialized()
    Accelerator(cpu=True, mixed_precision="bf16")
    assert is_initialized()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    assert not is_initialized()
    assert Accelerator(cpu=True).state.mixed_precision == "no"


def test_the_states_of_an_accelerator() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert isinstance(accelerator.state, AcceleratorState)
    accelerator.gradient_state.sync_gradients = False
    assert not GradientState().sync_gradients
    assert GradientState().plugin_kwargs == {"num_steps": 2}


def test_a_script_may_say_that_an_optimizer_skipped_its_step() -> None:
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    optimizer.step()
    for skipped, rate in ((False, 0.9), (True, 0.9), (False, 0.8)):
        optimizer._is_overflow = skipped
        assert accelerator.optimizer_step_was_skipped == skipped
        scheduler.step()
        assert scheduler.get_last_lr() == [pytest.approx(rate)]


def trained_on_an_indexed_cpu() -> tuple[str, bool, list[float]]:
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.full((1, 2), 1.0 + accelerator.process_index, device=accelerator.device)).sum())
    optimizer.step()
    weight = accelerator.unwrap_model(model).weight.detach().flatten().tolist()
    return str(accelerator.device), accelerator.multi_device, weight


def test_processes_train_on_a_cpu_with_an_index(two: Processes) -> None:
    done = two.run(trained_on_an_indexed_cpu, environment={"ACCELERATE_TORCH_DEVICE": "cpu:64"})
    assert done == [("cpu:64", False, [-0.5, -0.5])] * 2
