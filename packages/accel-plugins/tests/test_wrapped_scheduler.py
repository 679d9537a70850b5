"""When a scheduler moves, and by how much. The expected rows are what the original library did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accel_plugins import AcceleratedOptimizer, AcceleratedScheduler
from accel_state.gradient import GradientAccumulationPlugin, GradientState
from accel_testing.fresh import fresh

SYNCS = (True, False, True, True, False)

# (adjust_scheduler, processes, total_steps, split_batches, step_with_optimizer) -> (last_epoch, _step_count) per step
SEEN: dict[tuple[bool, int, int | None, bool, bool], list[tuple[int, int]]] = {
    (True, 1, None, False, True): [(1, 2), (1, 2), (2, 3), (3, 4), (3, 4)],
    (True, 1, None, True, True): [(1, 2), (1, 2), (2, 3), (3, 4), (3, 4)],
    (True, 1, None, False, False): [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6)],
    (True, 1, 8, False, True): [(1, 2), (1, 2), (2, 3), (3, 4), (3, 4)],
    (True, 3, None, False, True): [(3, 4), (3, 4), (6, 7), (9, 10), (9, 10)],
    (True, 3, None, True, True): [(1, 2), (1, 2), (2, 3), (3, 4), (3, 4)],
    (True, 3, None, False, False): [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6)],
    (True, 3, 8, False, True): [(3, 4), (3, 4), (6, 7), (8, 9), (8, 9)],
    (False, 1, None, False, True): [(1, 2), (1, 2), (2, 3), (3, 4), (3, 4)],
    (False, 3, None, False, True): [(3, 4), (3, 4), (6, 7), (9, 10), (9, 10)],
    (False, 3, None, True, True): [(1, 2), (1, 2), (2, 3), (3, 4), (3, 4)],
    (False, 3, 8, False, True): [(3, 4), (3, 4), (6, 7), (8, 9), (8, 9)],
    (False, 3, 8, False, False): [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6)],
}


def prepared(adjust: bool, processes: int, total: int | None, split: bool, follow: bool) -> tuple[Any, Any]:
    gradient = GradientState.of(GradientAccumulationPlugin(adjust_scheduler=adjust))
    inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)
    scheduler: Any = (
        torch.optim.lr_scheduler.StepLR(inner, 1, 0.9)
        if total is None
        else torch.optim.lr_scheduler.OneCycleLR(inner, max_lr=1.0, total_steps=total)
    )
    optimizer = AcceleratedOptimizer(inner, gradient=gradient)
    return optimizer, AcceleratedScheduler(scheduler, optimizer, follow, split, gradient=gradient, processes=processes)


@pytest.mark.parametrize("case", SEEN)
def test_it_moves_as_with_the_original(case: tuple[bool, int, int | None, bool, bool]) -> None:
    with fresh():
        optimizer, scheduler = prepared(*case)
        rows = []
        for sync in SYNCS:
            optimizer.gradient_state.sync_gradients = sync
            optimizer.step()
            scheduler.step()
            rows.append((scheduler.scheduler.last_epoch, scheduler.scheduler._step_count))

    assert rows == SEEN[case]


def test_it_stays_when_one_of_its_optimizers_skipped_its_step() -> None:
    with fresh():
        optimizer, scheduler = prepared(True, 2, None, False, True)
        other = AcceleratedOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
        scheduler.optimizers.append(other)
        optimizer.step()
        scheduler.step()
        assert scheduler.last_epoch == 2
        other._step = lambda inner, closure: False
        other.step()
        scheduler.step()

        assert other.step_was_skipped
        assert scheduler.last_epoch == 2


def test_it_shows_and_restores_the_scheduler_inside() -> None:
    with fresh():
        optimizer, scheduler = prepared(True, 1, None, False, True)
        optimizer.step()
        scheduler.step()
        _, other = prepared(True, 1, None, False, True)
        other.load_state_dict(scheduler.state_dict())

        assert scheduler.get_last_lr() == [0.9]
        assert other.scheduler.last_epoch == 1
        assert scheduler.base_lrs == [1.0]
        assert scheduler.optimizers == [optimizer]
        with pytest.raises(AttributeError, match="no_such_attribute"):
            _ = scheduler.no_such_attribute


def test_alone_it_asks_the_run_for_its_processes() -> None:
    with fresh():
        inner = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(inner, 1, 0.5), inner)
        inner.step()
        scheduler.step()

        assert scheduler.get_last_lr() == [0.5]


def test_how_it_was_made_can_be_read_again() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with fresh():
        wrapped = AcceleratedScheduler(scheduler, optimizer, step_with_optimizer=False, split_batches=True, processes=2)
        assert (wrapped.step_with_optimizer, wrapped.split_batches) == (False, True)
        assert not AcceleratedOptimizer(optimizer, device_placement=False).device_placement
