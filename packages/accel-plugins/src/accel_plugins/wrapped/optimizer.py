"""The optimizer that `prepare` gives back: it steps when gradients are complete, and the way the strategy steps."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch.optim import Optimizer

from accel_plugins.precision.base import Closure, Precision
from accel_state.errors import NotOffered
from accel_state.hang_report.progress import PROGRESS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from accel_state.gradient import GradientState
    from accel_state.run_state import AcceleratorState

__all__ = ("AcceleratedOptimizer", "EngineSteppedOptimizer", "SupportsStep", "inner_optimizer")

Step = Callable[[Optimizer, "Closure | None"], bool]


class SupportsStep(Protocol):
    """Whoever knows how an optimizer steps: a strategy or a precision."""

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Step; False when the step was skipped."""


class AcceleratedOptimizer(Optimizer):
    """An optimizer that acts only when gradients are synchronised.

    It is a real `torch.optim.Optimizer`, so schedulers take it, but all state is that of the optimizer it wraps.

    Args:
        optimizer: the user's optimizer.
        device_placement: whether loaded state is moved to where the parameters are; torch does that by itself.
        scaler: a gradient scaler to step with, where neither strategy nor precision is given.
        gradient: says whether gradients are synchronised; the state made last when None.
        strategy: decides how to step.
        precision: decides how to step where there is no strategy.

    Attributes:
        steps_in_backward: whether the optimizer changes each parameter during backward, as LOMO does; `step` has
            nothing to do then.
    """

    _steps = 0

    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        gradient: GradientState | None = None,
        strategy: SupportsStep | None = None,
        precision: Precision | None = None,
    ) -> None:
        if gradient is None:
            from accel_state.gradient import GradientState

            gradient = GradientState()
        self.optimizer = optimizer
        self.device_placement = device_placement
        self.scaler = scaler if scaler is not None or precision is None else precision.scaler
        self.gradient_state = gradient
        stepper = strategy or precision
        self.steps_in_backward = callable(getattr(optimizer, "fused_backward", None))
        self._step: Step = _nothing_left_to_do if self.steps_in_backward else _step_of(stepper, scaler)
        self._is_overflow = False

    @property
    def accelerator_state(self) -> AcceleratorState:
        """The process and its run."""
        from accel_state.run_state import AcceleratorState

        return AcceleratorState()

    @property
    def state(self) -> Any:
        """State of each parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameters by group with their options."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """Options of groups that do not say otherwise."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    # Schedulers read it at each step, which a function of C answers in less time.
    step_was_skipped = property(
        attrgetter("_is_overflow"),
        doc="Whether the last step at complete gradients was skipped, because they overflowed for example.",
    )

    def fused_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Backward and step in one, of an optimizer that steps in backward."""
        self.optimizer.fused_backward(loss, learning_rate)  # type: ignore[attr-defined]

    def step(self, closure: Closure | None = None) -> Any:
        """Step when gradients are synchronised; with a closure, return what it returned first."""
        if not self.gradient_state.sync_gradients:
            return None
        if closure is not None:
            return self._step_with(closure)
        self._is_overflow = not self._step(self.optimizer, None)
        # As `_count_step`, without its call.
        self._steps = steps = self._steps + 1
        if steps > PROGRESS.steps:
            PROGRESS.steps = PROGRESS.shared[1] = steps
        return None

    def _step_with(self, closure: Closure) -> Any:
        losses: list[Any] = []
        self._is_overflow = not self._step(self.optimizer, _recording(closure, losses))
        self._count_step()
        return losses[0] if losses else None

    def _count_step(self) -> None:
        """Let whoever looks at the run from outside see how many steps were made."""
        self._steps = steps = self._steps + 1
        # A loop with several optimizers is at the step of the one that has made most.
        if steps > PROGRESS.steps:
            PROGRESS.steps = PROGRESS.shared[1] = steps

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients when they are synchronised; within an accumulation they stay."""
        if not self.gradient_state.sync_gradients:
            return
        if set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        self.optimizer.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def train(self) -> None:
        """Switch an optimizer that averages weights (a schedule-free one) to training."""
        self._switch("train")

    def eval(self) -> None:
        """Switch an optimizer that averages weights (a schedule-free one) to evaluation."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        switch = getattr(self.optimizer, mode, None)
        if callable(switch):
            switch()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __copy__(self) -> AcceleratedOptimizer:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:
        # The run stays where it is: what is unpickled steps alone.
        return {name: value for name, value in self.__dict__.items() if name != "_step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._step = _nothing_left_to_do if self.steps_in_backward else _step_of(None, self.scaler)


class EngineSteppedOptimizer(AcceleratedOptimizer):
    """An optimizer that an engine steps; its own `step` only counts the step, and `zero_grad` does nothing.

    Args:
        optimizer: that of the engine.
        gradient: says whether gradients are synchronised; the state made last when None.

    Attributes:
        engine: name of the engine in errors.
        steps_when: when the engine steps, as errors say it.
    """

    engine: ClassVar[str]
    steps_when: ClassVar[str]

    def __init__(self, optimizer: Any, gradient: GradientState | None = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None, gradient=gradient)

    def step(self, closure: Closure | None = None) -> Any:
        """Count the step that the engine has made.

        Raises:
            NotOffered: a closure was given.
        """
        if closure is not None:
            raise NotOffered(
                f"Cannot call optimizer.step(closure) with {self.engine}.",
                f"The engine steps {self.steps_when}, and cannot compute gradients again.",
                "Call step() without a closure.",
            )
        if self.gradient_state.sync_gradients:
            self._count_step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine clears the gradients."""


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer that a prepared one wraps; another one as it is."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _recording(closure: Closure, losses: list[Any]) -> Closure:
    def record() -> Any:
        loss = closure()
        losses.append(loss)
        return loss

    return record


def _nothing_left_to_do(optimizer: Optimizer, closure: Closure | None = None) -> bool:
    """The step of an optimizer that has stepped in backward."""
    return True


def _step_of(stepper: SupportsStep | Precision | None, scaler: torch.amp.GradScaler | None) -> Step:
    """How to step: the given way, else plainly, or with a scaler that is updated at once."""
    if stepper is not None:
        return stepper.step
    if scaler is None:
        return Precision().step
    given = scaler

    def step(optimizer: Optimizer, closure: Closure | None) -> bool:
        before = given.get_scale()
        given.step(optimizer)
        given.update()
        return given.get_scale() >= before

    return step
