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


@pytest.mark.parametrize("bucket_bytes", [1, 20, 2**20])
def test_the_mean_of_two_replicas_comes_back(bucket_bytes: int) -> None:
    here, there = parameters(1.0, None, None, 4.0), parameters(3.0, 6.0, None, None)
    buckets, others = GradientBuckets(here, bucket_bytes), GradientBuckets(there, bucket_bytes)
    for one, other in zip(buckets.flat, others.flat, strict=True):
        one.add_(other).div_(2)
    buckets.write_back()
    values = [None if parameter.grad is None else set(parameter.grad.flatten().tolist()) for parameter in here]
    assert values == [{2.0}, {3.0}, None, {2.0}]


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
        buckets = GradientBuckets(made, 20)
        buckets.write_back()
    flags = len(made) * 4
    assert copies.bytes == sum(parameter.nbytes for parameter in made) + flags


def test_buckets_have_about_the_size_that_was_asked_for() -> None:
    made = parameters(1.0, 1.0, 1.0)
    assert len(GradientBuckets(made, 1).flat) == 3
    assert len(GradientBuckets(made, 24).flat) == 2
    assert len(GradientBuckets(made, 2**20).flat) == 1


def test_each_dtype_travels_by_itself() -> None:
    single, double = parameters(1.0)[0], torch.ones(2, dtype=torch.float64, requires_grad=True)
    double.grad = torch.ones(2, dtype=torch.float64)
    assert [bucket.dtype for bucket in GradientBuckets([single, double], 2**20).flat] == [torch.float32, torch.float64]
