"""Replicas are compared once after the second step, by a thread that no training process waits for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_testing.processes import Processes
from accel_torch import Accelerator, LocalSGD
from accel_torch.replicas import findings


class Kept(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def logged(loop: Callable[[Any], None], options: dict[str, Any]) -> list[str]:
    """What the comparison says on this process, once it has ended."""
    kept, logger = Kept(), logging.getLogger("accel_torch.replicas")
    logger.addHandler(kept)
    logger.propagate = False
    try:
        accelerator = Accelerator(cpu=True, **options)
        loop(accelerator)
        for thread in threading.enumerate():
            if thread.name == "accel-replica-comparison":
                thread.join(250)
                assert not thread.is_alive()
        # The main process reads what the others have posted: nobody may leave before.
        accelerator.wait_for_everyone()
    finally:
        logger.removeHandler(kept)
    return kept.messages


def train(accelerator: Any, loader: Any, optimizer: Any, model: Any, between: Any = None) -> None:
    for step, (inputs,) in enumerate(loader):
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(step)


def parts() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    data = TensorDataset(torch.arange(24.0).reshape(-1, 2) / 24)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=2)


def right(accelerator: Any) -> None:
    model, optimizer, loader = accelerator.prepare(*parts())
    train(accelerator, loader, optimizer, model)


def uneven(accelerator: Any) -> None:
    """Nothing is averaged, and the second process is slow: the first one must not wait for it."""
    model, optimizer, loader = accelerator.prepare(*parts())
    with accelerator.no_sync(model):
        train(accelerator, loader, optimizer, model, lambda _: time.sleep(0.2 * accelerator.process_index))


def unprepared_model(accelerator: Any) -> None:
    model, optimizer, loader = accelerator.prepare(*parts())
    train(accelerator, loader, optimizer, accelerator.unwrap_model(model))


def unprepared_loader(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, loader, optimizer, model)


def loader_divided_by_hand(accelerator: Any) -> None:
    model, optimizer, loader = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, list(loader)[accelerator.process_index :: 2], optimizer, model)


def constant_inputs(accelerator: Any) -> None:
    model, optimizer, _ = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, [(torch.ones(2, 2),)] * 4, optimizer, model)


def local_sgd(accelerator: Any) -> None:
    model, optimizer, loader = accelerator.prepare(*parts())
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=3):
        train(accelerator, loader, optimizer, model)


def several_accelerators(accelerator: Any) -> None:
    """The second process trains with the second Accelerator before the main process reads messages of the first."""
    right(accelerator)
    other = Accelerator(cpu=True)
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    model, optimizer, loader = other.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), parts()[2])
    train(other, loader, optimizer, model)


@pytest.mark.parametrize("loop", [right, loader_divided_by_hand, constant_inputs, local_sgd, several_accelerators])
def test_nothing_is_reported_of_a_right_run(two: Processes, loop: Any) -> None:
    assert two.run(logged, loop, {}) == [[], []]


def test_shards_are_compared_with_their_replicas_alone(two: Processes) -> None:
    assert two.run(logged, right, {"backend": "fsdp2"}) == [[], []]


@pytest.mark.parametrize("loop", [unprepared_model, uneven])
def test_replicas_that_differ_are_reported_by_the_main_process(two: Processes, loop: Any) -> None:
    (message,), second = two.run(logged, loop, {})
    assert second == []
    assert "Replicas differ after the second optimizer step, first in 'module.0.weight'" in message
    assert "0; 1" in message
    assert "check_replicas_every=0" in message


def test_equal_samples_of_an_unprepared_loader_are_reported(two: Processes) -> None:
    (message,), second = two.run(logged, unprepared_loader, {})
    assert message.startswith("All processes train on the same samples")
    assert second == []


@pytest.mark.parametrize("loop", [uneven, unprepared_loader])
def test_the_comparison_can_be_turned_off(two: Processes, loop: Any) -> None:
    assert two.run(logged, loop, {"check_replicas_every": 0}) == [[], []]


def message(rank: int, **changes: Any) -> dict[str, Any]:
    posted = {"places": ["a", "a"], "sums": [1, 2], "names": ["w", "b"], "data": rank, "inputs": [str(rank), "x"]}
    return {"count": 2, **posted, **changes}


def test_findings_name_the_first_parameter_and_the_sides() -> None:
    assert findings([message(0), message(1)]) == []
    (sentence,) = findings([message(0), message(1, sums=[1, 3]), message(2)])
    assert "first in 'b'" in sentence
    assert "0, 2; 1" in sentence
    assert findings([message(0), message(1, places=["b", "b"], sums=[3, 4])]) == []
    # Only the second tensor is sharded.
    (sentence,) = findings([message(0, places=["a", "b"]), message(1, places=["a", "c"], sums=[3, 4])])
    assert "first in 'w'" in sentence


def more_parameters(accelerator: Any) -> None:
    model, optimizer, loader = accelerator.prepare(*parts())
    if accelerator.process_index == 0:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    train(accelerator, loader, optimizer, model)


def test_optimizers_with_different_numbers_of_parameters_are_reported(two: Processes) -> None:
    (message,), second = two.run(logged, more_parameters, {})
    assert second == []
    assert "first in the number of the optimizer's parameters" in message
    assert "0; 1" in message


def test_findings_on_inputs_need_processes_that_should_read_different_samples() -> None:
    same = {"inputs": ["x", "y"]}
    assert "same samples" in findings([message(0, **same), message(1, **same)])[0]
    assert findings([message(0, **same, data=0), message(1, **same, data=0)]) == []
    assert findings([message(rank, inputs=["x", "x"]) for rank in range(2)]) == []
    assert findings([message(rank, inputs=[]) for rank in range(2)]) == []
