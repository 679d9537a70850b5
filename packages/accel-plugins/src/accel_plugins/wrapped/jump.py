"""Moving a learning-rate scheduler on by many steps at once, with rates and state bit-equal to stepping one by one.

Three kinds of schedules can do it. Some compute the rate from the position alone: the position moves and one step
follows. Some change the rate at a few positions: the changes in between are repeated. Some multiply the rate at each
step: that recursion is repeated in plain floats. Only torch's own classes are handled, by exact type, and only when
all rates are plain floats; everything else steps one by one.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch.optim import lr_scheduler

__all__ = ("advance",)

_FEW: Final = 2
"""Up to this many steps, stepping is as quick as jumping."""


def advance(scheduler: Any, steps: int, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> None:
    """Do `scheduler.step(*args, **kwargs)` `steps` times; past `total_steps` a scheduler stays where it is."""
    if kwargs is None:
        kwargs = {}
    if hasattr(scheduler, "total_steps"):
        steps = min(steps, scheduler.total_steps - scheduler._step_count + 1)
    if steps > _FEW and not args and not kwargs:
        steps -= _try_jump(scheduler, steps)
    for _ in range(steps):
        scheduler.step(*args, **kwargs)


def _try_jump(scheduler: Any, steps: int) -> int:
    """Jump if this scheduler can; the number of steps that were made (0: it cannot)."""
    jump = _JUMPS.get(type(scheduler))
    if jump is None or any(type(group["lr"]) is not float for group in scheduler.optimizer.param_groups):
        return 0
    if scheduler._step_count == 1:
        # The first step warns of an optimizer that has not stepped.
        scheduler.step()
        return 1 + _try_jump(scheduler, steps - 1)
    return steps if jump(scheduler, steps) else 0


# ------------------------------------------------- the rate follows from the position


def _by_position(scheduler: Any, steps: int) -> bool:
    scheduler.last_epoch += steps - 1
    scheduler._step_count += steps - 1
    scheduler.step()
    return True


def _lambda(scheduler: Any, steps: int) -> bool:
    # An object may count its calls.
    return all(_is_function(rate) for rate in scheduler.lr_lambdas) and _by_position(scheduler, steps)


def _cyclic(scheduler: Any, steps: int) -> bool:
    scale = getattr(scheduler, "_scale_fn_custom", None)
    return (scale is None or _is_function(scale)) and _by_position(scheduler, steps)


def _is_function(given: object) -> bool:
    return isinstance(given.func if isinstance(given, functools.partial) else given, FunctionType)


def _warm_restarts(scheduler: Any, steps: int) -> bool:
    if not isinstance(scheduler.T_cur, int) or not isinstance(scheduler.T_i, int):
        return False
    position, period = scheduler.T_cur + steps - 1, scheduler.T_i
    if scheduler.T_mult == 1:
        position %= period
    while position >= period:
        position, period = position - period, period * scheduler.T_mult
    scheduler.T_cur, scheduler.T_i = position, period
    scheduler.last_epoch += steps - 1
    scheduler.step()
    return True


# ------------------------------------------------- the rate is what it was, changed step by step


def _by_factors(factors: Callable[[Any, int, int], Iterator[float]]) -> Callable[[Any, int], bool]:
    """A jump that multiplies every rate by the factors met from position `first` to `last`, both included."""

    def jump(scheduler: Any, steps: int) -> bool:
        met = list(factors(scheduler, scheduler.last_epoch + 1, scheduler.last_epoch + steps))
        rates = []
        for group in scheduler.optimizer.param_groups:
            rate = group["lr"]
            for factor in met:
                rate = rate * factor
            rates.append(rate)
        return _land(scheduler, steps, rates)

    return jump


def _land(scheduler: Any, steps: int, rates: list[float]) -> bool:
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler.last_epoch += steps
    scheduler._step_count += steps
    scheduler._last_lr = rates
    return True


def _step_factors(scheduler: Any, first: int, last: int) -> Iterator[float]:
    size = scheduler.step_size
    for _ in range(last // size - (first - 1) // size):
        yield scheduler.gamma


def _milestone_factors(scheduler: Any, first: int, last: int) -> Iterator[float]:
    milestones = _in_order(scheduler)
    for milestone in milestones[bisect_left(milestones, first) : bisect_right(milestones, last)]:
        yield scheduler.gamma ** scheduler.milestones[milestone]


# Kept outside of the scheduler, whose attributes are its state.
_sorted: WeakKeyDictionary[Any, tuple[Any, list[int]]] = WeakKeyDictionary()


def _in_order(scheduler: Any) -> list[int]:
    """All milestones of a schedule, sorted once; a state that is loaded brings others."""
    counted, milestones = _sorted.get(scheduler, (None, []))
    if counted is not scheduler.milestones or len(counted) != len(milestones):
        milestones = sorted(scheduler.milestones)
        _sorted[scheduler] = scheduler.milestones, milestones
    return milestones


def _constant_factors(scheduler: Any, first: int, last: int) -> Iterator[float]:
    if first <= scheduler.total_iters <= last:
        yield 1.0 / scheduler.factor


def _exponential_factors(scheduler: Any, first: int, last: int) -> Iterator[float]:
    for _ in range(first, last + 1):
        yield scheduler.gamma


def _linear_factors(scheduler: Any, first: int, last: int) -> Iterator[float]:
    rise = scheduler.end_factor - scheduler.start_factor
    for position in range(first, min(last, scheduler.total_iters) + 1):
        yield 1.0 + rise / (scheduler.total_iters * scheduler.start_factor + (position - 1) * rise)


def _polynomial_factors(scheduler: Any, first: int, last: int) -> Iterator[float]:
    total, power = scheduler.total_iters, scheduler.power
    for position in range(first, min(last, total) + 1):
        yield ((1.0 - position / total) / (1.0 - (position - 1) / total)) ** power


def _cosine(scheduler: Any, steps: int) -> bool:
    first, last = scheduler.last_epoch + 1, scheduler.last_epoch + steps
    period, low, pi, cos = scheduler.T_max, scheduler.eta_min, math.pi, math.cos
    rates = []
    for group, base in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
        rate = group["lr"]
        before = 1 + cos(pi * (first - 1) / period)
        for position in range(first, last + 1):
            now = 1 + cos(pi * position / period)
            if (position - 1 - period) % (2 * period) == 0:
                rate = rate + (base - low) * (1 - cos(pi / period)) / 2
            else:
                rate = now / before * (rate - low) + low
            before = now
        rates.append(rate)
    return _land(scheduler, steps, rates)


_JUMPS: Final[Mapping[type, Callable[[Any, int], bool]]] = {
    lr_scheduler.LambdaLR: _lambda,
    lr_scheduler.OneCycleLR: _by_position,
    lr_scheduler.CyclicLR: _cyclic,
    lr_scheduler.CosineAnnealingWarmRestarts: _warm_restarts,
    lr_scheduler.StepLR: _by_factors(_step_factors),
    lr_scheduler.MultiStepLR: _by_factors(_milestone_factors),
    lr_scheduler.ConstantLR: _by_factors(_constant_factors),
    lr_scheduler.ExponentialLR: _by_factors(_exponential_factors),
    lr_scheduler.LinearLR: _by_factors(_linear_factors),
    lr_scheduler.PolynomialLR: _by_factors(_polynomial_factors),
    lr_scheduler.CosineAnnealingLR: _cosine,
}
