"""A jump lands exactly where stepping lands: rates, momenta and saved state, bit for bit."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from accel_plugins.wrapped.scheduler import advance

Make = Callable[[torch.optim.Optimizer, random.Random], Any]

MAKERS: dict[str, Make] = {
    "LambdaLR": lambda o, r: schedulers.LambdaLR(o, [lambda e: 1 / (1 + e), lambda e: 0.99**e]),
    "OneCycleLR": lambda o, r: schedulers.OneCycleLR(o, [1.0, 0.3], total_steps=r.randint(20, 400)),
    "OneCycleLR_3": lambda o, r: schedulers.OneCycleLR(o, 1.0, total_steps=r.randint(20, 400), three_phase=True),
    "CyclicLR": lambda o, r: schedulers.CyclicLR(o, 0.01, 1.0, r.randint(1, 60), mode="triangular2"),
    "CyclicLR_exp": lambda o, r: schedulers.CyclicLR(o, 0.01, 1.0, r.randint(1, 9), mode="exp_range", gamma=0.999),
    "CosineAnnealingWarmRestarts": lambda o, r: schedulers.CosineAnnealingWarmRestarts(o, r.randint(1, 30), 1, 1e-3),
    "WarmRestarts_2": lambda o, r: schedulers.CosineAnnealingWarmRestarts(o, r.randint(1, 9), r.randint(2, 3)),
    "StepLR": lambda o, r: schedulers.StepLR(o, r.randint(1, 40), r.uniform(0.5, 0.99)),
    "MultiStepLR": lambda o, r: schedulers.MultiStepLR(o, [r.randint(1, 300) for _ in range(40)], 0.93),
    "ConstantLR": lambda o, r: schedulers.ConstantLR(o, r.uniform(0.1, 0.9), r.randint(0, 300)),
    "LinearLR": lambda o, r: schedulers.LinearLR(o, r.uniform(0.1, 1), r.uniform(0.1, 1), r.randint(1, 300)),
    "ExponentialLR": lambda o, r: schedulers.ExponentialLR(o, r.uniform(0.9, 0.999)),
    "CosineAnnealingLR": lambda o, r: schedulers.CosineAnnealingLR(o, r.randint(1, 300), r.uniform(0, 0.1)),
    "PolynomialLR": lambda o, r: schedulers.PolynomialLR(o, r.randint(1, 300), r.uniform(0.5, 3)),
    "MultiplicativeLR": lambda o, r: schedulers.MultiplicativeLR(o, lambda e: 0.98),
    "SequentialLR": lambda o, r: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1, 10), schedulers.ExponentialLR(o, 0.9)], milestones=[r.randint(1, 99)]
    ),
}


def optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.7, 0.123)]
    made = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    made.step()
    return made


def twins(name: str, seed: int) -> Iterator[Any]:
    for _ in range(2):
        scheduler = MAKERS[name](optimizer(), random.Random(seed))
        scheduler.optimizer.step()
        yield scheduler


def picture(scheduler: Any) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in scheduler.optimizer.param_groups]
    state = {k: v for k, v in scheduler.state_dict().items() if k not in ("_schedulers", "lr_lambdas", "milestones")}
    return {"groups": groups, "state": state, "last": scheduler.get_last_lr()}


def one_by_one(scheduler: Any, steps: int) -> None:
    for _ in range(steps):
        if not hasattr(scheduler, "total_steps") or scheduler._step_count <= scheduler.total_steps:
            scheduler.step()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("seed", range(6))
def test_a_jump_equals_the_steps(name: str, seed: int) -> None:
    jumping, stepping = twins(name, seed)
    for steps in [1, 2, *random.Random(seed + 100).choices([1, 3, 4, 8, 17, 128, 1024], k=6)]:
        advance(jumping, steps)
        one_by_one(stepping, steps)

        assert picture(jumping) == picture(stepping)
        kinds = {key: type(value) for key, value in jumping.state_dict().items()}
        assert kinds == {key: type(value) for key, value in stepping.state_dict().items()}


JUMPING = ["LambdaLR", "OneCycleLR", "OneCycleLR_3", "CyclicLR", "CyclicLR_exp", "CosineAnnealingWarmRestarts"]


@pytest.mark.parametrize("name", MAKERS)
def test_schedules_that_follow_from_their_position_take_one_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jumping, _ = twins(name, 1)
    made = []
    original = type(jumping).step
    monkeypatch.setattr(type(jumping), "step", lambda self, *args: (made.append(1), original(self, *args))[1])
    advance(jumping, 17)

    assert len(made) == (1 if name in JUMPING else 17)


def test_a_schedule_ends_at_its_total_and_does_not_raise() -> None:
    scheduler = schedulers.OneCycleLR(optimizer(), 1.0, total_steps=10)
    scheduler.optimizer.step()
    for _ in range(4):
        advance(scheduler, 7)

    assert scheduler.last_epoch == 10


class Counting:
    """A rate that depends on how often it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / self.calls


def test_a_rate_with_a_memory_is_asked_at_every_step() -> None:
    rate = Counting()
    scheduler = schedulers.LambdaLR(optimizer(), rate)
    scheduler.optimizer.step()
    before = rate.calls
    advance(scheduler, 8)

    assert rate.calls == before + 8 * 2


def test_a_subclass_is_stepped() -> None:
    class Own(schedulers.StepLR):
        def get_lr(self) -> list[float]:
            return [1 / (1 + self.last_epoch)] * len(self.optimizer.param_groups)

    scheduler = Own(optimizer(), 3)
    scheduler.optimizer.step()
    advance(scheduler, 9)

    assert scheduler.get_last_lr() == [0.1, 0.1]


def test_rates_that_are_tensors_are_stepped() -> None:
    made = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5))
    scheduler = schedulers.ExponentialLR(made, 0.5)
    made.step()
    advance(scheduler, 4)

    assert math.isclose(float(made.param_groups[0]["lr"]), 0.5**5)


def test_arguments_reach_every_step() -> None:
    scheduler = schedulers.ReduceLROnPlateau(optimizer(), patience=2)
    advance(scheduler, 4, (1.0,))

    assert scheduler.num_bad_epochs == 0
    assert scheduler.last_epoch == 4
    assert scheduler.get_last_lr()[0] == pytest.approx(0.07)


def test_the_first_step_still_warns_of_an_optimizer_that_has_not_stepped() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    scheduler = schedulers.LambdaLR(torch.optim.SGD(parameters, lr=0.1), lambda epoch: 1 / (1 + epoch))

    with pytest.warns(UserWarning, match="before `optimizer.step"):
        advance(scheduler, 8)
    assert copy.copy(scheduler).last_epoch == 8
