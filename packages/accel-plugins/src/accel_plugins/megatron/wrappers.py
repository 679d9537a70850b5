"""An optimizer and a schedule whose work the engine does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_plugins.precision.base import Closure
from accel_plugins.wrapped.optimizer import AcceleratedOptimizer
from accel_plugins.wrapped.scheduler import AcceleratedScheduler
from accel_state.errors import NotOffered

if TYPE_CHECKING:
    from accel_state.gradient import GradientState

__all__ = ("MegatronLMOptimizerWrapper", "MegatronLMSchedulerWrapper")


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer of Megatron-LM, which the engine steps; its own `step` and `zero_grad` do nothing.

    Args:
        optimizer: what `get_megatron_optimizer` made.
        gradient: says whether gradients are synchronised; the state made last when None.

    Attributes:
        skipped: whether the engine's last step was skipped because gradients overflowed.
    """

    def __init__(self, optimizer: Any, gradient: GradientState | None = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None, gradient=gradient)
        self.skipped = False

    def step(self, closure: Closure | None = None) -> Any:
        """Nothing but to count: the engine has stepped.

        Raises:
            NotOffered: a closure was given.
        """
        if closure is not None:
            raise NotOffered(
                "optimizer.step(closure) was called with Megatron-LM.",
                "The engine steps when the model is called, and cannot compute gradients again.",
                "Call step() without a closure.",
            )
        if self.gradient_state.sync_gradients:
            self._count_step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing: the engine forgets gradients before each step."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients overflowed."""
        return self.skipped


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """A schedule that the engine moves when it steps; its own `step` does nothing.

    Args:
        scheduler: that of Megatron-LM, or one of torch that follows Megatron's optimizer.
        optimizers: those it follows.
    """

    def __init__(self, scheduler: Any, optimizers: Any, gradient: GradientState | None = None) -> None:
        super().__init__(scheduler, optimizers, gradient=gradient, processes=1)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine has moved it."""

    def get_last_lr(self) -> list[float]:
        """Learning rate of each group of parameters."""
        ours = getattr(self.scheduler, "get_last_lr", None)
        if ours is not None:
            return list(ours())
        return [float(group["lr"]) for group in self.scheduler.optimizer.param_groups]
