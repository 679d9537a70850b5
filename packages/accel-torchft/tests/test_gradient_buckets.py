"""Gradients go into flat buckets and come back, also of parameters that a replica did not use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from accel_torchft.gradients import GradientBuckets


def parameters(*gradients: float | None) -> list[torch.Tensor]:
    made = []
    for number, value in enumerate(gradients, start=1):
        parameter = torch.zeros(number, 2, requires_grad=True)
        parameter.grad = None if value is None else torch.full((number, 2), value)
        made.append(parameter)
    return made


class Arrived:
    """A bucket that has arrived when it is sent."""

    def wait(self) -> None:
        pass


def never() -> bool:
    return False


def always() -> bool:
    return True


def of(made: list[torch.Tensor], bucket_bytes: int, sent: list[torch.Tensor], leaves: Any = never) -> GradientBuckets:
    """Buckets that are noted when they are sent."""

    def send(flat: torch.Tensor) -> Arrived:
        sent.append(flat)
        return Arrived()

    return GradientBuckets(made, bucket_bytes, send, leaves)


@pytest.mark.parametrize("bucket_bytes", [1, 20, 2**20])
def test_the_mean_of_two_replicas_comes_back(bucket_bytes: int) -> None:
    here, there = parameters(1.0, None, None, 4.0), parameters(3.0, 6.0, None, None)
    others: list[torch.Tensor] = []
    of(there, bucket_bytes, others).average()
    arriving = iter([flat.clone() for flat in others])

    def exchange(flat: torch.Tensor) -> Arrived:
        flat.add_(next(arriving)).div_(2)
        return Arrived()

    GradientBuckets(here, bucket_bytes, exchange, never).average()
    values = [None if parameter.grad is None else set(parameter.grad.flatten().tolist()) for parameter in here]
    assert values == [{2.0}, {3.0}, None, {2.0}]


def test_a_bucket_leaves_when_backward_has_computed_its_last_gradient() -> None:
    first, last, sent = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), list[torch.Tensor]()
    buckets = of([*first.parameters(), *last.parameters()], 24, sent, always)
    assert len(buckets) == 2
    seen: list[int] = []
    # Runs when the gradients of the first layer are computed.
    first.weight.register_hook(lambda gradient: seen.append(len(sent)))
    last(first(torch.ones(1, 2))).sum().backward()
    assert seen == [1]
    assert len(sent) == 2
    buckets.average()
    assert len(sent) == 2


def test_gradients_of_batches_before_the_last_stay() -> None:
    layer, sent, last = torch.nn.Linear(2, 1), list[torch.Tensor](), False
    buckets = of(list(layer.parameters()), 2**20, sent, lambda: last)
    layer(torch.ones(1, 2)).sum().backward()
    assert sent == []
    last = True
    layer(torch.ones(1, 2)).sum().backward()
    assert [flat.tolist() for flat in sent] == [[1, 1, 2, 2, 2]]
    buckets.average()


def test_gradients_that_change_after_they_have_left_are_sent_again() -> None:
    layer, sent = torch.nn.Linear(2, 1), list[torch.Tensor]()
    buckets = of(list(layer.parameters()), 2**20, sent, always)
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()
    buckets.average()
    assert [flat.tolist() for flat in sent] == [[1, 1, 1, 1, 1], [1, 1, 2, 2, 2]]
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[2, 2]]


def test_a_parameter_without_gradient_holds_its_bucket_back_until_the_end() -> None:
    used, unused, sent = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1), list[torch.Tensor]()
    buckets = of([*used.parameters(), *unused.parameters()], 2**20, sent, always)
    used(torch.ones(1, 2)).sum().backward()
    assert sent == []
    buckets.average()
    assert len(sent) == 1
    assert unused.weight.grad is None


class Copies(TorchDispatchMode):
    """Counts the bytes that are written by copying."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.cat.default, torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.bytes += made.nbytes
        return made


def test_gradients_are_copied_once() -> None:
    made = parameters(1.0, 2.0, 3.0)
    with Copies() as copies:
        of(made, 20, []).average()
    flags = len(made) * 4
    assert copies.bytes == sum(parameter.nbytes for parameter in made) + flags


def test_buckets_have_about_the_size_that_was_asked_for() -> None:
    made = parameters(1.0, 1.0, 1.0)
    assert len(of(made, 1, [])) == 3
    assert len(of(made, 40, [])) == 2
    assert len(of(made, 2**20, [])) == 1


def test_each_dtype_travels_by_itself() -> None:
    single, double = parameters(1.0)[0], torch.ones(2, dtype=torch.float64, requires_grad=True)
    double.grad = torch.ones(2, dtype=torch.float64)
    sent: list[torch.Tensor] = []
    of([single, double], 2**20, sent).average()
    assert [bucket.dtype for bucket in sent] == [torch.float64, torch.float32]
