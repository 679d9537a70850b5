"""The learning-rate scheduler that `prepare` gives back: it moves when the optimizers have stepped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from accel_plugins.wrapped.jump import advance

if TYPE_CHECKING:
    from accel_state.gradient import GradientState

__all__ = ("AcceleratedScheduler",)


class AcceleratedScheduler:
    """A scheduler that follows its optimizers.

    A schedule is written for the batches that one process sees in a run of one. With several processes each step uses
    as many batches as there are processes, so the schedule moves on by that many, unless batches are split between
    them.

    Args:
        scheduler: the user's scheduler.
        optimizers: the optimizers it follows: it stays where it is when one of them skipped its step.
        step_with_optimizer: False moves it by one at every call, whatever the optimizers do.
        split_batches: whether loaders split each batch, so that a step uses as much data as with one process.
        gradient: says whether gradients are synchronised; the state made last when None.
        processes: how many processes share the data; those of the run when None.
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
        """Move on when the optimizers have stepped; arguments go to the scheduler."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        gradient = self.gradient_state
        if not gradient.sync_gradients:
            if gradient.plugin.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                self.scheduler._step_count += 1
            return
        for optimizer in self.optimizers:
            if getattr(optimizer, "step_was_skipped", False):
                return
        if self._plain:
            self.scheduler.step(*args, **kwargs)
        else:
            advance(self.scheduler, self._stride, args, kwargs)

    def get_last_lr(self) -> list[Any]:
        """Learning rates in use, one per group."""
        rates: list[Any] = self.scheduler.get_last_lr()
        return rates

    def get_lr(self) -> list[Any]:
        """What the wrapped scheduler's `get_lr` computes."""
        rates: list[Any] = self.scheduler.get_lr()
        return rates

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """What the wrapped scheduler's `print_lr` does, where it has one."""
        return self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped scheduler."""
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
