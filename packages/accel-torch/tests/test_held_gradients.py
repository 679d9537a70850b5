"""Contexts that hold gradients back or synchronise them, nested in each other, with every backend that has them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from accel_ops import reduce
from accel_testing.processes import Processes
from accel_torch import Accelerator, FullyShardedDataParallelPlugin

BACKENDS = ["ddp", "fsdp1", "fsdp2"]
RATE = 0.1


class Net(nn.Module):
    """Sharding ignores `head`, whose gradients are full ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.body(inputs))
        return hidden


class Training:
    """A prepared model with the gradients that it must have after each backward.

    Args:
        backend: "ddp", "fsdp1" or "fsdp2".
        accumulation: micro-batches per optimizer step.
        frozen: whether the module that is not sharded is frozen until `prepare` has ended.
        in_shards: whether the model is built inside `init_module`.
    """

    def __init__(self, backend: str, accumulation: int = 1, frozen: bool = False, in_shards: bool = False) -> None:
        plugin = None
        if backend != "ddp":
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=int(backend[-1]), ignored_modules="head", auto_wrap_policy="NO_WRAP"
            )
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=accumulation)
        torch.manual_seed(0)
        self.plain = Net()
        torch.manual_seed(0)
        with self.accelerator.init_module() if in_shards else nullcontext():
            model = Net()
        model.head.requires_grad_(not frozen)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.SGD(model.parameters(), RATE))
        self.accelerator.unwrap_model(self.model).head.requires_grad_(True)
        self.inputs = torch.full((2, 4), float(self.accelerator.process_index + 1))
        (self.plain(self.inputs).sum() / accumulation).backward()
        self.own = {name: gradient(parameter) for name, parameter in self.plain.named_parameters()}
        self.expected = {name: torch.zeros_like(own) for name, own in self.own.items()}

    def backward(self, synchronised: bool) -> None:
        """Run a micro-batch, and compare the gradient of the full parameter with the expected one."""
        self.accelerator.backward(self.model(self.inputs).sum())
        self.expected = {name: total + self.own[name] for name, total in self.expected.items()}
        if synchronised:
            self.expected = {name: reduce(total, "mean") for name, total in self.expected.items()}
        if not synchronised and self.accelerator.distributed_type == "MULTI_CPU":
            # A reducer of DDP that was prepared for a backward which never came also averages the next one.
            return
        head = self.accelerator.unwrap_model(self.model).head
        torch.testing.assert_close(gradient(head.weight), self.expected["head.weight"])

    def no_sync(self) -> AbstractContextManager[object]:
        return self.accelerator.no_sync(self.model)

    def trigger(self) -> AbstractContextManager[object]:
        return self.accelerator.trigger_sync_in_backward(self.model)

    def check_weights(self) -> None:
        """Step, and compare all weights with those that the expected gradients give."""
        self.optimizer.step()
        state = self.accelerator.get_state_dict(self.model)
        for name, parameter in self.plain.named_parameters():
            if state:
                torch.testing.assert_close(state[name], parameter.detach() - RATE * self.expected[name])


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


class Stop(Exception):
    pass


def trigger_inside(training: Training) -> None:
    with training.no_sync():
        training.backward(synchronised=False)
        with training.trigger():
            training.backward(synchronised=True)


def trigger_inside_then_held(training: Training) -> None:
    with training.no_sync():
        with training.trigger():
            training.backward(synchronised=True)
        training.backward(synchronised=False)
    training.backward(synchronised=True)


def trigger_outside(training: Training) -> None:
    with training.no_sync():
        training.backward(synchronised=False)
    with training.trigger():
        training.backward(synchronised=True)


def held_twice(training: Training) -> None:
    with training.no_sync():
        with training.no_sync():
            training.backward(synchronised=False)
        training.backward(synchronised=False)
    training.backward(synchronised=True)


def trigger_inside_two(training: Training) -> None:
    with training.no_sync(), training.no_sync():
        training.backward(synchronised=False)
        with training.trigger():
            training.backward(synchronised=True)


def held_inside_a_trigger(training: Training) -> None:
    with training.trigger():
        with training.no_sync():
            training.backward(synchronised=False)
        training.backward(synchronised=True)


def held_in_trigger_in_held(training: Training) -> None:
    with training.no_sync():
        with training.trigger():
            with training.no_sync():
                training.backward(synchronised=False)
            training.backward(synchronised=True)
        training.backward(synchronised=False)
    training.backward(synchronised=True)


def error_while_held(training: Training) -> None:
    with suppress(Stop), training.no_sync(), training.no_sync():
        training.backward(synchronised=False)
        raise Stop
    training.backward(synchronised=True)


def error_in_a_trigger(training: Training) -> None:
    with training.no_sync():
        with suppress(Stop), training.trigger():
            raise Stop
        training.backward(synchronised=False)
    training.backward(synchronised=True)


def held_by_the_wrapper(training: Training) -> None:
    """A script holds gradients back through torch's own interface of the wrapper."""
    model: Any = training.model
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        training.backward(synchronised=False)
        with training.no_sync():
            training.backward(synchronised=False)
        training.backward(synchronised=False)
        with training.trigger():
            training.backward(synchronised=True)
        model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            training.backward(synchronised=False)
            with training.no_sync():
                training.backward(synchronised=False)
            training.backward(synchronised=False)
            with training.trigger():
                training.backward(synchronised=True)
    training.backward(synchronised=True)


def no_context(training: Training) -> None:
    training.backward(synchronised=True)
    training.backward(synchronised=True)


SCENARIOS = [
    trigger_inside,
    trigger_inside_then_held,
    trigger_outside,
    held_twice,
    trigger_inside_two,
    held_inside_a_trigger,
    held_in_trigger_in_held,
    error_while_held,
    error_in_a_trigger,
    held_by_the_wrapper,
    no_context,
]


def run(backend: str, scenario: Callable[[Training], None], options: dict[str, Any]) -> None:
    training = Training(backend, **options)
    scenario(training)
    training.check_weights()


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_averaged_when_the_innermost_context_says_so(
    two: Processes, backend: str, scenario: Callable[[Training], None]
) -> None:
    two.run(run, backend, scenario, {})


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_module_built_in_shards_are_averaged_too(two: Processes, backend: str) -> None:
    two.run(run, backend, trigger_inside, {"in_shards": True})


@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2"])
def test_gradients_of_a_module_that_was_unfrozen_after_prepare_are_averaged_too(two: Processes, backend: str) -> None:
    two.run(run, backend, trigger_inside, {"frozen": True})


def accumulate(backend: str) -> None:
    training = Training(backend, accumulation=3)
    for step in range(2):
        for micro_batch in range(3):
            with training.accelerator.accumulate(training.model):
                if micro_batch == step:
                    with training.trigger():
                        training.backward(synchronised=True)
                else:
                    training.backward(synchronised=micro_batch == 2)
        if step == 0:
            training.optimizer.zero_grad()
            training.expected = {name: torch.zeros_like(own) for name, own in training.own.items()}
    training.check_weights()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_accumulation_may_contain_a_synchronised_micro_batch(two: Processes, backend: str) -> None:
    two.run(accumulate, backend)


def one_of_two_held(backend: str) -> None:
    first = Training(backend)
    second = Training(backend)
    with first.no_sync():
        first.backward(synchronised=False)
        second.backward(synchronised=True)
        with second.no_sync(), first.trigger():
            second.backward(synchronised=False)
            first.backward(synchronised=True)
        second.backward(synchronised=True)
        first.backward(synchronised=False)
    with first.accelerator.no_sync(first.model, second.model):
        first.backward(synchronised=False)
        second.backward(synchronised=False)
        with second.trigger():
            second.backward(synchronised=True)
    first.backward(synchronised=True)
    first.check_weights()
    second.check_weights()


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_of_two_models_is_held_back_alone(two: Processes, backend: str) -> None:
    two.run(one_of_two_held, backend)


def enter_late(backend: str) -> None:
    training = Training(backend)
    absent: Any = None
    with suppress(AttributeError, TypeError):
        training.accelerator.no_sync(training.model, absent)
    held = training.accelerator.no_sync(training.model, training.model)
    training.backward(synchronised=True)
    with held:
        training.backward(synchronised=False)
    training.backward(synchronised=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_context_of_several_models_begins_when_it_is_entered(two: Processes, backend: str) -> None:
    two.run(enter_late, backend)
