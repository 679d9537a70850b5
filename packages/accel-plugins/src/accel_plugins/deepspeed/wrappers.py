"""What `prepare` gives back with DeepSpeed: an engine that backward goes through, and objects whose work it does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from accel_plugins.precision.base import Closure
from accel_plugins.wrapped.optimizer import AcceleratedOptimizer
from accel_plugins.wrapped.scheduler import AcceleratedScheduler
from accel_state.errors import NotOffered

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_state.gradient import GradientState

__all__ = ("DeepSpeedEngineWrapper", "DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper")


class DeepSpeedEngineWrapper:
    """Backward and, at the end of an accumulation window, everything a step consists of.

    Args:
        engine: what `deepspeed.initialize` made.

    Attributes:
        client_state: what was given to `save_state(client_state=...)`, once a checkpoint was loaded.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.client_state: dict[str, Any] = {}

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients; with `sync_gradients`, reduce and clip them, step, and move the schedule.

        Args:
            loss: not divided by the number of micro-batches: the engine does that.
            sync_gradients: whether this is the last micro-batch of its window.
            kwargs: go to the engine's `backward`.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """Total norm of the gradients of the last step, before they were clipped; None before the first."""
        norm = self.engine.get_global_grad_norm()
        return float(norm) if hasattr(norm, "item") else norm


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer that the engine steps during backward; its own `step` and `zero_grad` do nothing.

    Args:
        optimizer: that of the engine.
        gradient: says whether gradients are synchronised; the state made last when None.
    """

    def __init__(self, optimizer: Any, gradient: GradientState | None = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None, gradient=gradient)

    def step(self, closure: Closure | None = None) -> Any:
        """Nothing but to count: the engine has stepped.

        Raises:
            NotOffered: a closure was given.
        """
        if closure is not None:
            raise NotOffered(
                "optimizer.step(closure) was called with DeepSpeed.",
                "The engine steps during backward, and cannot compute gradients again.",
                "Call step() without a closure.",
            )
        if self.gradient_state.sync_gradients:
            self._count_step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing: the engine forgets gradients when it has stepped."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that the engine moves when it steps; its own `step` does nothing.

    Args:
        scheduler: that of the engine.
        optimizers: those it follows.
    """

    def __init__(
        self, scheduler: Any, optimizers: Optimizer | Iterable[Optimizer], gradient: GradientState | None = None
    ) -> None:
        super().__init__(scheduler, optimizers, gradient=gradient, processes=1)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine has moved it."""
