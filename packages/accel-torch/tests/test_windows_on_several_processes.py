"""Windows of several micro-batches with options that need each of them: a static graph, and clipping at each one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accel_testing.processes import Processes
from accel_torch import Accelerator, DistributedDataParallelKwargs, GradScalerKwargs, LocalSGD

pytestmark = pytest.mark.usefixtures("fresh_state")

MICRO_BATCHES = 9
"""The last window of two or four is short."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def samples(processes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(MICRO_BATCHES, processes, 4, generator=generator)


Clip = Callable[[Any, Any], float]
"""Clips the gradients of a model, with torch alone where the Accelerator is None; returns the norm before, or 0."""


def clip_norm(accelerator: Any, model: Any) -> float:
    clip = torch.nn.utils.clip_grad_norm_ if accelerator is None else accelerator.clip_grad_norm_
    return float(clip(model.parameters(), 0.2))


def clip_value(accelerator: Any, model: Any) -> float:
    clip = torch.nn.utils.clip_grad_value_ if accelerator is None else accelerator.clip_grad_value_
    clip(model.parameters(), 0.1)
    return 0.0


def clip_nothing(accelerator: Any, model: Any) -> float:
    return 0.0


def plain(window: int, processes: int, clip: Clip = clip_nothing) -> tuple[list[float], list[float]]:
    """Weights and norms of a plain loop on the samples of all processes."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    norms = []
    for index, inputs in enumerate(samples(processes)):
        ((model(inputs) - 1).square().mean() / window).backward()
        norms.append(clip(None, model))
        if (index + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).tolist(), norms


def trained(
    window: int, options: dict[str, Any], clip: Clip = clip_nothing, static_later: bool = False
) -> tuple[list[float], list[float]]:
    """The same with an Accelerator."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window, **options)
    model: Any = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    if static_later:
        model._set_static_graph()
    norms = []
    for inputs in samples(accelerator.num_processes)[:, accelerator.process_index :][:, :1]:
        with accelerator.accumulate(model):
            accelerator.backward((model(inputs) - 1).square().mean())
            norms.append(clip(accelerator, model))
            optimizer.step()
            optimizer.zero_grad()
    return nn.utils.parameters_to_vector(accelerator.unwrap_model(model).parameters()).tolist(), norms


PRECISIONS: dict[str, dict[str, Any]] = {
    "no": {},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(init_scale=512.0)]},
}
TOLERANCE = {"no": 1e-5, "bf16": 3e-2, "fp16": 3e-3}


# ------------------------------------------------------------------------------------------- a static graph


def with_static_graphs(options: dict[str, Any], cases: list[tuple[int, bool]]) -> list[list[float]]:
    handlers = options.get("kwargs_handlers", [])
    found = []
    for window, later in cases:
        given = [*handlers, DistributedDataParallelKwargs(static_graph=not later)]
        found.append(trained(window, {**options, "kwargs_handlers": given}, static_later=later)[0])
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("world", ["two", "three"])
def test_a_static_graph_accumulates(world: str, precision: str, request: pytest.FixtureRequest) -> None:
    processes: Processes = request.getfixturevalue(world)
    count = {"two": 2, "three": 3}[world]
    cases = [(1, False), (2, False), (4, False), (2, True)]
    # The settings of DDP belong to a run.
    for alike in (cases[:3], cases[3:]):
        first, *others = processes.run(with_static_graphs, PRECISIONS[precision], alike)
        for (window, _), weights in zip(alike, first, strict=True):
            assert weights == pytest.approx(plain(window, count)[0], abs=TOLERANCE[precision])
        assert all(weights == first for weights in others)


def local_sgd_with_a_static_graph() -> list[float]:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
    model: Any = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=3) as averaging:
        for inputs in samples(2)[:, accelerator.process_index :][:, :1]:
            accelerator.backward((model(inputs) - 1).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            averaging.step()
    return nn.utils.parameters_to_vector(accelerator.unwrap_model(model).parameters()).tolist()


def test_local_sgd_with_a_static_graph_is_synchronised_at_each_step(two: Processes) -> None:
    for weights in two.run(local_sgd_with_a_static_graph):
        assert weights == pytest.approx(plain(1, 2)[0], abs=1e-5)


# -------------------------------------------------------------------------------- clipping each micro-batch


@pytest.mark.parametrize("clip", [clip_norm, clip_value])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("window", [1, 2, 4])
def test_clipping_each_micro_batch_clips_what_was_accumulated(window: int, precision: str, clip: Clip) -> None:
    weights, norms = trained(window, PRECISIONS[precision], clip)
    expected, plain_norms = plain(window, 1, clip)

    assert weights == pytest.approx(expected, abs=TOLERANCE[precision])
    assert norms == pytest.approx(plain_norms, rel=10 * TOLERANCE[precision])


@pytest.mark.parametrize("clip", [clip_norm, clip_value])
@pytest.mark.parametrize("world", ["two", "three"])
def test_clipping_each_micro_batch_in_fp16_on_several_processes(
    world: str, clip: Clip, request: pytest.FixtureRequest
) -> None:
    processes: Processes = request.getfixturevalue(world)
    first, *others = processes.run(trained, 2, PRECISIONS["fp16"], clip)
    exact = processes.run(trained, 2, PRECISIONS["no"], clip)[0]
    assert all(weights == first[0] for weights, _ in others)
    assert first[0] == pytest.approx(exact[0], abs=TOLERANCE["fp16"])
    assert first[1] == pytest.approx(exact[1], rel=0.03)


def overflowing(clip: Clip, overflows_at: int, scale: float) -> list[bool]:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=scale)],
    )
    model: Any = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    skipped = []
    for index in range(6):
        with accelerator.accumulate(model):
            loss = model(torch.ones(1, 4)).sum()
            accelerator.backward(loss * float("inf") if index == overflows_at else loss)
            clip(accelerator, model)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            skipped.append(optimizer.step_was_skipped)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    return skipped


@pytest.mark.parametrize("clip", [clip_norm, clip_value])
@pytest.mark.parametrize(("at", "scale"), [(0, 512.0), (0, 1.0), (1, 512.0), (2, 512.0), (3, 512.0)])
def test_a_clip_inside_of_a_window_does_not_hide_an_overflow(clip: Clip, at: int, scale: float) -> None:
    assert overflowing(clip, at, scale) == [at // 2 == window for window in range(3)]


def test_gradients_are_unscaled_once_they_are_complete() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, **PRECISIONS["fp16"])
    model: Any = nn.Linear(1, 1, bias=False)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    norms, gradients = [], []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), 8.0)).sum())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 100.0).item())
            gradients.append(model.weight.grad.item())

    assert norms == [4.0, 8.0]
    assert gradients == [512.0 * 4.0, 8.0]
