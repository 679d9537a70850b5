"""The optimizer that `prepare` returns: it steps when gradients are synchronised, by the methods of the strategy.

It is the only caller of what a strategy does around a step: `finalize_gradients`, `step` or `leave_out`, and
`after_step`, in this order. So a loop of a script, of the Accelerator and of the test kit drives a strategy alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol

from torch.optim import Optimizer

from accel_plugins.layers import model_of_optimizer
from accel_plugins.precision.base import Closure, Precision
from accel_plugins.wrapped.step_hooks import StepHooks
from accel_state.errors import NotOffered
from accel_state.watch.record import STATUS_RECORD, STEPS

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from accel_plugins.context import Context
    from accel_plugins.precision.scaling import SteppedOnDevice
    from accel_state.gradient import GradientState
    from accel_state.run_state import AcceleratorState

__all__ = ("AcceleratedOptimizer", "EngineSteppedOptimizer", "inner_optimizer")

Step = Callable[[Optimizer, "Closure | None"], bool]


class _Steps(Protocol):
    """What the optimizer calls of a strategy. A strategy is above this module, so this is not its class."""

    context: Context

    def overrides(self, method: str) -> bool:
        """Whether a method does anything else than in one process."""

    def finalize_gradients(self, optimizer: Optimizer) -> None:
        """Complete the gradients."""

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Step; return False when the step was skipped."""

    def leave_out(self, optimizer: Optimizer) -> None:
        """Clear the gradients of a step that is left out."""

    def after_step(self, model: Module | None, optimizer: Optimizer) -> None:
        """Do what follows a step."""


class _Outcome(NamedTuple):
    """The outcome of a step that the host knows."""

    skipped: bool


_STEPPED: Final = _Outcome(skipped=False)


class _LeftOut(Exception):
    """Ends an optimizer's step from inside its closure, before it changed a weight."""


def _outcome_of(stepped: object) -> _Outcome | SteppedOnDevice:
    """The outcome of a step, from what a strategy or a precision returned."""
    if stepped is True:
        return _STEPPED
    from accel_plugins.precision.scaling import SteppedOnDevice

    return stepped if isinstance(stepped, SteppedOnDevice) else _Outcome(not stepped)


class AcceleratedOptimizer(Optimizer):
    """An optimizer that acts only when gradients are synchronised.

    It is a subclass of `torch.optim.Optimizer`, so schedulers accept it; all state is in the wrapped optimizer.

    Args:
        optimizer: the user's optimizer.
        device_placement: whether loaded state is moved to the parameters' device; has no effect, because torch always
            does.
        scaler: a gradient scaler for the step, used without strategy and precision.
        gradient: the gradient state: whether gradients are synchronised; None: the latest instance.
        strategy: the strategy, which completes the gradients, makes the step and does what follows it.
        precision: makes the step if there is no strategy.
        step_hooks: what is called around each step; None: nothing.

    Attributes:
        steps_in_backward: whether the optimizer updates parameters during backward, as LOMO does; `step` then does
            nothing.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        gradient: GradientState | None = None,
        strategy: _Steps | None = None,
        precision: Precision | None = None,
        step_hooks: StepHooks | None = None,
    ) -> None:
        if gradient is None:
            from accel_state.gradient import GradientState

            gradient = GradientState()
        self.optimizer = optimizer
        self.device_placement = device_placement
        self.scaler = scaler if scaler is not None or precision is None else precision.scaler
        self.gradient_state = gradient
        self.steps_in_backward = callable(getattr(optimizer, "fused_backward", None))
        self.step_hooks = StepHooks() if step_hooks is None or self.steps_in_backward else step_hooks
        self._step: Step = _nothing_left_to_do if self.steps_in_backward else _step_of(strategy, precision, scaler)
        # What the strategy does not override does nothing, and is not called.
        self._finalize_gradients = _overridden(strategy, "finalize_gradients")
        self._after_step = _overridden(strategy, "after_step")
        self._leave_out: Callable[[Optimizer], None] = Optimizer.zero_grad if strategy is None else strategy.leave_out
        self._model: weakref.ref[Module] | None = None
        self._outcome: _Outcome | SteppedOnDevice = _STEPPED
        self._steps = 0

    @property
    def as_set_up(self) -> Optimizer:
        """The optimizer that a strategy's `setup` returned: an engine's own wrapper, or the one inside this wrapper."""
        return self.optimizer if type(self) is AcceleratedOptimizer else self

    @property
    def accelerator_state(self) -> AcceleratorState:
        """The process and its run."""
        from accel_state.run_state import AcceleratorState

        return AcceleratorState()

    @property
    def state(self) -> Any:
        """The state of each parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of parameters with their options."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The default options of groups."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    # Schedulers read it at each step; a C function is faster here.
    step_was_skipped = property(
        attrgetter("_outcome.skipped"),
        doc="Whether the last synchronised step was skipped, for example because gradients overflowed. "
        "After a step of a fused optimizer in fp16, reading it waits for the device.",
    )

    @property
    def _is_overflow(self) -> bool:
        """`step_was_skipped`; scripts of the original assign it."""
        skipped: bool = self.step_was_skipped
        return skipped

    @_is_overflow.setter
    def _is_overflow(self, skipped: bool) -> None:
        self._outcome = _Outcome(skipped)

    def fused_backward(self, loss: Tensor, learning_rate: float) -> None:
        """Run backward and step together, for an optimizer that steps in backward."""
        self.optimizer.fused_backward(loss, learning_rate)  # type: ignore[attr-defined]

    def step(self, closure: Closure | None = None) -> Any:
        """Step when gradients are synchronised; with a closure, return the result of its first call."""
        # Python reads attributes of a class with `__getattr__` more slowly than items of a dict.
        own: Any = self.__dict__
        if not own["gradient_state"].sync_gradients:
            return None
        hooks = own["step_hooks"]
        if (
            hooks.before_step
            or hooks.after_step
            or closure is not None
            or own["_finalize_gradients"] is not None
            or own["_after_step"] is not None
        ):
            return self._step_with(closure)
        if hooks.judge_step and not self._is_good():
            stepped = self._leave_step_out()
        else:
            stepped = own["_step"](own["optimizer"], None)
        own["_outcome"] = _STEPPED if stepped is True else _outcome_of(stepped)
        # The code of `_count_step`, without the cost of a call.
        own["_steps"] = steps = own["_steps"] + 1
        STATUS_RECORD.stepped = True
        if steps > STATUS_RECORD.steps:
            STATUS_RECORD.steps = STATUS_RECORD.cells[STEPS] = steps
        return None

    def _step_with(self, closure: Closure | None) -> Any:
        """Step with a closure, hooks, or what the strategy does around a step."""
        optimizer, hooks = self.optimizer, self.step_hooks
        losses: list[Any] = []
        for before_gradients_complete in hooks.before_gradients_complete:
            before_gradients_complete()
        if closure is None and self._finalize_gradients is not None:
            self._finalize_gradients(optimizer)
        for before_step in hooks.before_step:
            before_step(optimizer)
        stepped = self._step_if_good(optimizer, None if closure is None else self._completing(closure, losses))
        self._outcome = _outcome_of(stepped)
        if self._after_step is not None and stepped:
            self._after_step(self._model_that_trains(), optimizer)
        for after_step in hooks.after_step:
            after_step(optimizer, stepped)
        self._count_step()
        return losses[0] if losses else None

    def _step_if_good(self, optimizer: Optimizer, closure: Closure | None) -> Any:
        """Step, or leave the step out if a hook decides so; the result of the step."""
        if closure is None and not self._is_good():
            return self._leave_step_out()
        try:
            return self._step(optimizer, closure)
        except _LeftOut:
            return self._leave_step_out()

    def _is_good(self) -> bool:
        """Whether no hook leaves this step out."""
        good = True
        for judge_step in self.step_hooks.judge_step:
            # All are asked, since each may communicate.
            good = judge_step(self.optimizer) and good
        return good

    def _leave_step_out(self) -> bool:
        self._leave_out(self.optimizer)
        return False

    def _completing(self, closure: Closure, losses: list[Any]) -> Closure:
        """The closure; gradients that it computes are completed, and the losses that it returns are kept."""

        def compute() -> Any:
            loss = closure()
            if self._finalize_gradients is not None:
                self._finalize_gradients(self.optimizer)
            losses.append(loss)
            if len(losses) == 1 and not self._is_good():
                raise _LeftOut
            return loss

        return compute

    def _model_that_trains(self) -> Module | None:
        """The model of the optimizer's parameters, found at the first use: models may be prepared later."""
        model = None if self._model is None else self._model()
        if model is None and (model := model_of_optimizer(self.optimizer)) is not None:
            self._model = weakref.ref(model)
        return model

    def _count_step(self) -> None:
        """Report the number of steps to the run status."""
        self._steps = steps = self._steps + 1
        # With several optimizers, the run's step is that of the one with the most steps.
        STATUS_RECORD.stepped = True
        if steps > STATUS_RECORD.steps:
            STATUS_RECORD.steps = STATUS_RECORD.cells[STEPS] = steps

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Reset the gradients if they are synchronised; during accumulation, keep them."""
        own = self.__dict__
        if not own["gradient_state"].sync_gradients:
            return
        if set_to_none is None:
            own["optimizer"].zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        self.optimizer.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.optimizer.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """The state of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def train(self) -> None:
        """Switch a schedule-free optimizer, which averages weights, to training."""
        self._switch("train")

    def eval(self) -> None:
        """Switch a schedule-free optimizer, which averages weights, to evaluation."""
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
        # The copy does not include the run: after unpickling, the optimizer steps without a strategy.
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_THE_RUN}
        return {**state, "_outcome": _Outcome(self.step_was_skipped)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.step_hooks = StepHooks()
        self._step = _nothing_left_to_do if self.steps_in_backward else _step_of(None, None, self.scaler)
        self._finalize_gradients = self._after_step = self._model = None
        self._leave_out = Optimizer.zero_grad


class EngineSteppedOptimizer(AcceleratedOptimizer):
    """An optimizer that an engine steps: `step` only counts the step, and `zero_grad` does nothing.

    Args:
        optimizer: the optimizer of the engine.
        gradient: the gradient state: whether gradients are synchronised; None: the latest instance.

    Attributes:
        engine: name of the engine in errors.
        steps_when: when the engine steps, as text for errors.
    """

    engine: ClassVar[str]
    steps_when: ClassVar[str]

    def __init__(self, optimizer: Any, gradient: GradientState | None = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None, gradient=gradient)

    def step(self, closure: Closure | None = None) -> Any:
        """Count a step that the engine made.

        Raises:
            NotOffered: a closure was passed.
        """
        if closure is not None:
            raise NotOffered(
                f"Cannot call optimizer.step(closure) with {self.engine}.",
                f"The engine steps {self.steps_when} and cannot call a closure.",
                "Call step() without a closure.",
            )
        if self.gradient_state.sync_gradients:
            self._count_step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine clears the gradients."""


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside a prepared one; any other optimizer is returned unchanged."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


_OF_THE_RUN: Final = ("_step", "_finalize_gradients", "_leave_out", "_after_step", "_model", "step_hooks")
"""Attributes that a pickled optimizer does not contain."""


def _nothing_left_to_do(optimizer: Optimizer, closure: Closure | None = None) -> bool:
    """The step of an optimizer that already stepped in backward."""
    return True


def _overridden(strategy: _Steps | None, name: str) -> Callable[..., Any] | None:
    """A method of a strategy that its class overrides, or None."""
    return None if strategy is None or not strategy.overrides(name) else getattr(strategy, name)


def _step_of(strategy: _Steps | None, precision: Precision | None, scaler: torch.amp.GradScaler | None) -> Step:
    """The method that steps: of the strategy or the precision, else a plain step or one with a scaler."""
    if strategy is not None:
        # A call less for each step of a strategy that leaves it to the precision.
        return _overridden(strategy, "step") or strategy.context.precision.step
    if precision is not None:
        return precision.step
    if scaler is None:
        return Precision().step
    from accel_plugins.precision.scaling import scaled_step

    def step(optimizer: Optimizer, closure: Closure | None) -> bool:
        stepped = scaled_step(scaler, optimizer)
        scaler.update()
        return stepped

    return step
