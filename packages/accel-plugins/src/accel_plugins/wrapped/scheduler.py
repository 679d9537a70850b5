"""The learning-rate scheduler that `prepare` returns: it steps only after the optimizers have stepped.

If a step of the run is many steps of the schedule, `advance` makes them all at once; rates and state are bitwise equal
to those of single steps.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from torch.optim import Optimizer, lr_scheduler

if TYPE_CHECKING:
    from accel_state.gradient import GradientState

__all__ = (
    "AcceleratedScheduler",
    "advance",
)

_MAX_SINGLE_STEPS: Final = 2
"""Up to this number of steps, single steps are as fast as a jump."""


def advance(scheduler: Any, steps: int, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> None:
    """Call `scheduler.step(*args, **kwargs)` `steps` times, but not beyond the end of the schedule (`total_steps`)."""
    if kwargs is None:
        kwargs = {}
    left = _steps_left(scheduler)
    if left is not None:
        steps = min(steps, left)
    if steps > _MAX_SINGLE_STEPS and not args and not kwargs:
        steps -= _try_jump(scheduler, steps)
    for _ in range(steps):
        scheduler.step(*args, **kwargs)


def _steps_left(scheduler: Any) -> int | None:
    """Steps until the end of a schedule, or of the first schedule inside it to end; None: it has no end."""
    total, position = getattr(scheduler, "total_steps", None), getattr(scheduler, "last_epoch", None)
    if total is not None and position is not None:
        # `_step_count` counts from where the scheduler was constructed, which may be later in the schedule.
        return int(total - position)
    inside = getattr(scheduler, "_schedulers", None)
    if not inside:
        return None
    milestones = getattr(scheduler, "_milestones", None)
    if not milestones:
        return min((left for left in map(_steps_left, inside) if left is not None), default=None)
    last = _steps_left(inside[-1])
    # Before the last milestone, the last schedule is one step before its start.
    return None if last is None else last + max(milestones[-1] - scheduler.last_epoch - 1, 0)


def _try_jump(scheduler: Any, steps: int) -> int:
    """Jump if this scheduler supports it; return the number of steps made (0: not supported)."""
    jump = _JUMPS.get(type(scheduler))
    if jump is None or any(type(group["lr"]) is not float for group in scheduler.optimizer.param_groups):
        return 0
    if scheduler._step_count == 1:
        # The first step warns if the optimizer has not stepped.
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
    # A callable object may count its calls.
    return all(_is_function(rate) for rate in scheduler.lr_lambdas) and _by_position(scheduler, steps)


def _cyclic(scheduler: Any, steps: int) -> bool:
    scale = getattr(scheduler, "_scale_fn_custom", None)
    return (scale is None or _is_function(scale)) and _by_position(scheduler, steps)


def _is_function(function: object) -> bool:
    return isinstance(function.func if isinstance(function, functools.partial) else function, FunctionType)


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
    """A jump that multiplies every rate by the factors of positions `first` to `last`, both included."""

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


# Not stored as an attribute of the scheduler, because all its attributes are saved as state.
_sorted: WeakKeyDictionary[Any, tuple[Any, list[int]]] = WeakKeyDictionary()


def _in_order(scheduler: Any) -> list[int]:
    """All milestones of a schedule, sorted once; loading a state may replace them."""
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


class AcceleratedScheduler:
    """A scheduler that steps after its optimizers.

    Users write a schedule for the batches of a run of one process. With several processes each step uses one batch per
    process, so the schedule advances by the number of processes, unless `split_batches` divides each batch.

    Args:
        scheduler: the user's scheduler.
        optimizers: its optimizers: it does not step when one of them skipped its step.
        step_with_optimizer: False advances it by one at every call, whether or not the optimizers step.
        split_batches: whether loaders divide each batch, so that a step uses as much data as with one process.
        gradient: the gradient state: whether gradients are synchronised; None: the latest instance.
        processes: number of processes among which data is divided; None: that of the run.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Optimizer | Iterable[Optimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        gradient: GradientState | None = None,
        processes: int | None = None,
    ) -> None:
        if gradient is None:
            from accel_state.gradient import GradientState

            gradient = GradientState()
        if processes is None:
            from accel_state import current

            processes = current.process_or_start().world_size
        self.scheduler = scheduler
        self.optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.gradient_state = gradient
        self._stride = processes
        self._plain = split_batches or (processes == 1 and not hasattr(scheduler, "total_steps"))

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if the optimizers have stepped; arguments go to the scheduler."""
        # Python reads attributes of a class with `__getattr__` more slowly than items of a dict.
        own = self.__dict__
        scheduler, gradient = own["scheduler"], own["gradient_state"]
        if not own["step_with_optimizer"]:
            scheduler.step(*args, **kwargs)
            return
        if not gradient.sync_gradients:
            return
        for optimizer in own["optimizers"]:
            if getattr(optimizer, "step_was_skipped", False):
                return
        if not own["_plain"]:
            advance(scheduler, own["_stride"], args, kwargs)
        elif args or kwargs:
            scheduler.step(*args, **kwargs)
        else:
            scheduler.step()

    def get_last_lr(self) -> list[Any]:
        """The current learning rates, one per group."""
        rates: list[Any] = self.scheduler.get_last_lr()
        return rates

    def get_lr(self) -> list[Any]:
        """The result of the wrapped scheduler's `get_lr`."""
        rates: list[Any] = self.scheduler.get_lr()
        return rates

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped scheduler's `print_lr`, if it has one."""
        return self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.scheduler!r})"
