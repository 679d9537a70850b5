"""Iterators that stay open beside a loop: the one that yielded last is current, and each has its own position."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_data import DataLoaderConfiguration
from accel_testing.processes import Processes
from accel_torch import Accelerator, FullyShardedDataParallelPlugin

pytestmark = pytest.mark.usefixtures("fresh_state")

HELD = {
    "one batch of four": (4, [1]),
    "two batches, to the last": (2, [1, 2]),
    "the only batch": (1, [1]),
    "begun before the loop": (2, [-1]),
    "the only batch, before the loop": (1, [-1]),
    "one in every step, begun again at its end": (3, list(range(1, 20))),
}


def rows(count: int) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(count)).reshape(count, 1), batch_size=1)  # type: ignore[arg-type]


def steps_with_an_open_iterator(case: str, plugin: Any = None) -> list[int]:
    """The batches at which gradients are synchronised, with a validation iterator advanced by hand."""
    size, advanced_at = HELD[case]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, fsdp_plugin=plugin)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    processes = accelerator.num_processes
    train, validation = accelerator.prepare(rows(18 * processes), rows(size * processes))
    held = iter(validation)
    if advanced_at == [-1]:
        next(held)
    steps = []
    for number, batch in enumerate(train):
        if number in advanced_at:
            try:
                next(held)
            except StopIteration:
                held = iter(validation)
                next(held)
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            if accelerator.sync_gradients:
                steps.append(number)
            optimizer.step()
            optimizer.zero_grad()
    return steps


@pytest.mark.parametrize("case", HELD)
def test_an_open_validation_iterator_leaves_the_windows_of_training(case: str) -> None:
    assert steps_with_an_open_iterator(case) == [3, 7, 11, 15, 17]


def all_cases(sharded: bool) -> list[list[int]]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
    return [steps_with_an_open_iterator(case, plugin) for case in HELD]


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_an_open_validation_iterator_on_two_processes(two: Processes, sharded: bool) -> None:
    for steps in two.run(all_cases, sharded):
        assert steps == [[3, 7, 11, 15, 17]] * len(HELD)


def metrics_with_an_open_iterator() -> tuple[list[int], list[bool]]:
    """Results of a loop beside an iterator that has yielded its last, padded batch."""
    accelerator = Accelerator(cpu=True)
    train, validation = accelerator.prepare(
        DataLoader(torch.arange(16), batch_size=4),  # type: ignore[arg-type]
        DataLoader(torch.arange(3), batch_size=4),  # type: ignore[arg-type]
    )
    held = iter(validation)
    next(held)
    results: list[int] = []
    ends = []
    for batch in train:
        results += accelerator.gather_for_metrics(batch).tolist()
        ends.append(accelerator.gradient_state.end_of_dataloader)
    assert accelerator.gradient_state.active_dataloader is validation
    return results, ends


@pytest.mark.parametrize("world", ["one", "two", "three"])
def test_an_open_iterator_does_not_cut_the_results_of_the_loop(world: str, request: pytest.FixtureRequest) -> None:
    processes: Processes = request.getfixturevalue(world)
    for results, ends in processes.run(metrics_with_an_open_iterator):
        assert results[:16] == list(range(16))
        assert len(results) == 16
        assert ends == [False] * (len(ends) - 1) + [True]


def one_loader_twice(cases: list[tuple[bool, int]]) -> list[tuple[Any, ...]]:
    """One loader in `zip`, and in two nested loops with metrics in both and accumulation in the outer one."""
    found = []
    for dispatch, workers in cases:
        configuration = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3, dataloader_config=configuration)
        loader = accelerator.prepare(DataLoader(torch.arange(10), batch_size=2, num_workers=workers))  # type: ignore[arg-type]
        model = torch.nn.Linear(1, 1)
        pairs = [(one.tolist(), other.tolist()) for one, other in zip(loader, loader, strict=True)]
        alone = [batch.tolist() for batch in loader]
        outer: list[int] = []
        inner: list[list[int]] = []
        synchronises = []
        for batch in loader:
            inner.append([x for other in loader for x in accelerator.gather_for_metrics(other).tolist()])
            outer += accelerator.gather_for_metrics(batch).tolist()
            with accelerator.accumulate(model):
                synchronises.append(accelerator.sync_gradients)
        assert not accelerator.gradient_state.in_dataloader
        found.append((pairs, alone, outer, inner, synchronises))
    return found


@pytest.mark.parametrize("world", ["one", "two", "three"])
def test_one_loader_in_two_loops(world: str, request: pytest.FixtureRequest) -> None:
    processes: Processes = request.getfixturevalue(world)
    cases = list(product((False, True), (0, 1)))
    for results in processes.run(one_loader_twice, cases, timeout=250):
        for case, (pairs, alone, outer, inner, synchronises) in zip(cases, results, strict=True):
            steps = len(alone)
            assert pairs == [(batch, batch) for batch in alone], case
            assert outer == list(range(10)), case
            assert inner == [list(range(10))] * steps, case
            assert synchronises == [(n + 1) % 3 == 0 or n == steps - 1 for n in range(steps)], case


def test_the_end_of_an_inner_loop_ends_its_window() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    outer, inner = accelerator.prepare(rows(2), rows(3))
    model = torch.nn.Linear(1, 1)
    synchronises = []
    for _ in outer:
        for _ in inner:
            with accelerator.accumulate(model):
                synchronises.append(accelerator.sync_gradients)
    assert synchronises == [False, False, True] * 2
