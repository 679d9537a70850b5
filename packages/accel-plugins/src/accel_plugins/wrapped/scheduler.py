"""The learning-rate scheduler that `prepare` returns: it steps only after the optimizers have stepped.

If a step of the run is many steps of the schedule, `advance` makes them: at once if the schedule follows from its
position. Rates and state are bitwise equal to those of single steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

from torch.optim import Optimizer, lr_scheduler

if TYPE_CHECKING:
    from accel_state.gradient import GradientState

__all__ = (
    "AcceleratedScheduler",
    "advance",
)

_FUNCTIONS_OF: Final[Mapping[type, Callable[[Any], Iterable[Any]]]] = {
    lr_scheduler.LambdaLR: lambda scheduler: scheduler.lr_lambdas,
    lr_scheduler.OneCycleLR: lambda scheduler: (),
    lr_scheduler.CyclicLR: lambda scheduler: filter(None, [getattr(scheduler, "_scale_fn_custom", None)]),
}
"""Classes whose rates follow from the position, and the user's functions in them."""


def advance(scheduler: Any, steps: int, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> None:
    """Call `scheduler.step(*args, **kwargs)` `steps` times, but not beyond the end of the schedule (`total_steps`)."""
    left = _steps_left(scheduler)
    if left is not None:
        steps = min(steps, left)
    if steps > 1 and not args and not kwargs and _jump(scheduler, steps):
        return
    step = functools.partial(scheduler.step, *args, **kwargs or {}) if args or kwargs else scheduler.step
    for _ in range(steps):
        step()


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


def _jump(scheduler: Any, steps: int) -> bool:
    """Step once to the position after `steps` steps, if the schedule follows from its position; else do nothing.

    A schedule of another class may compute each rate from the one before, and a callable object may count its calls.
    """
    kind = type(scheduler)
    if kind is lr_scheduler.CosineAnnealingWarmRestarts and scheduler.T_mult == 1:
        # With longer and longer periods, torch computes the position in a period from logarithms, which round.
        scheduler.step(scheduler.last_epoch + steps)
        return True
    if kind not in _FUNCTIONS_OF or not all(map(_is_plain, _FUNCTIONS_OF[kind](scheduler))):
        return False
    scheduler.last_epoch += steps - 1
    scheduler.step()
    # Part of the saved state; during the step it tells torch whether to warn that the optimizer has not stepped.
    scheduler._step_count += steps - 1
    return True


def _is_plain(function: object) -> bool:
    return isinstance(function.func if isinstance(function, functools.partial) else function, FunctionType)


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

    @property
    def as_set_up(self) -> Any:
        """The scheduler that a strategy's `setup` returned: an engine's own wrapper, or the one inside this wrapper."""
        return self.scheduler if type(self) is AcceleratedScheduler else self

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
