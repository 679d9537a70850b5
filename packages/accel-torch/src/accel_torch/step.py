"""One optimizer step, from the loss to complete, clipped gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from accel_plugins import strategy as base
from accel_plugins.precision.base import Precision
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.errors import NotOffered, SettingError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from accel_plugins.precision.base import Closure
    from accel_plugins.prepared import PreparedObjects
    from accel_plugins.strategy import Strategy
    from accel_torch.accumulation import Accumulation
    from accel_torch.session import Session

__all__ = ("OptimizerStepper", "clip_grad_norm", "clip_grad_value", "fused_backward", "unscale_gradients")


class OptimizerStepper:
    """Steps prepared optimizers, with complete gradients and the strategy's `step`."""

    __slots__ = (
        "_accumulation",
        "_elastic",
        "_finalizes",
        "_has_after_step",
        "_model",
        "_plain",
        "_prepared",
        "_simple",
        "_step",
        "_strategy",
    )

    def __init__(self, strategy: Strategy, accumulation: Accumulation, prepared: PreparedObjects) -> None:
        self._strategy, self._accumulation = strategy, accumulation
        # A weak reference: the prepared objects have references to the optimizers, which refer to this object.
        self._prepared = weakref.ref(prepared)
        # Methods that a strategy does not override do nothing, and calling them at each step costs time.
        self._has_after_step = type(strategy).after_step is not base.Strategy.after_step
        self._finalizes = type(strategy).finalize_gradients is not base.Strategy.finalize_gradients
        as_it_is = type(strategy).step is base.Strategy.step
        precision = strategy.context.precision
        self._step = precision.step if as_it_is else strategy.step
        self._plain = as_it_is and type(precision).step is Precision.step
        self._elastic = strategy.capabilities.elastic
        self._simple = self._plain and not (self._elastic or self._finalizes or self._has_after_step)
        self._model: weakref.ref[Module] | None = None

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        """Step; False when the step was skipped."""
        if self._simple and closure is None and self._accumulation.weighting is None:
            optimizer.step()
            return True
        if self._finalizes or self._accumulation.weighting is not None:
            complete(self._strategy, self._accumulation, optimizer)
        if self._elastic:
            self._accumulation.note_step()
        if self._plain and closure is None:
            optimizer.step()
            stepped = True
        else:
            stepped = self._step(optimizer, closure)
        # In this order, because reading the result may wait for the device.
        if self._has_after_step and stepped:
            self._strategy.after_step(self._model_of(optimizer), optimizer)
        return stepped

    def _model_of(self, optimizer: Optimizer) -> Module | None:
        """The model of the optimizer's parameters; found at the first use, since models may be prepared later."""
        model = None if self._model is None else self._model()
        prepared = self._prepared()
        if model is None and prepared is not None and (model := prepared.owner_of(optimizer)) is not None:
            self._model = weakref.ref(model)
        return model


def complete(strategy: Strategy, accumulation: Accumulation, optimizer: Optimizer) -> None:
    """Complete an optimizer's gradients over the window and all processes; a repeated call changes nothing."""
    strategy.finalize_gradients(optimizer)
    if accumulation.weighting is not None:
        accumulation.weighting.complete(optimizer)


def unscale_gradients(session: Session, optimizers: Iterable[Any] | None = None) -> None:
    """Complete the gradients of prepared optimizers and divide them by the loss scale; None means all of them."""
    for wrapped in session.prepared.optimizers if optimizers is None else optimizers:
        optimizer: Optimizer = inner_optimizer(wrapped)
        complete(session.strategy, session.accumulation, optimizer)
        if not session.backend.capabilities.own_precision:
            session.precision.unscale(optimizer)


def fused_backward(session: Session, loss: Tensor, learning_rate: float | None) -> None:
    """Backward in which optimizers such as LOMO update each parameter as soon as its gradient exists.

    Raises:
        SettingError: `learning_rate` is None, or no such optimizer was prepared.
        NotOffered: the run has several processes or accumulates gradients.
    """
    fused = [optimizer for optimizer in session.prepared.optimizers if _steps_in_backward(optimizer)]
    asked = "Cannot step the optimizer during backward (LOMO)."
    if not fused:
        raise SettingError(
            asked,
            "No prepared optimizer supports it.",
            "Prepare a Lomo or AdaLomo optimizer, or call backward(loss) without learning_rate.",
        )
    if learning_rate is None:
        raise SettingError(
            asked,
            "The learning rate is missing.",
            "Call backward(loss, learning_rate=...), which also steps the optimizer.",
        )
    if session.gradient.num_steps > 1 or session.state.use_distributed:
        raise NotOffered(
            asked,
            "The optimizer frees each gradient before the next is computed, so gradients cannot be accumulated or "
            "averaged.",
            "Train in one process without accumulation, or with another optimizer.",
        )
    for optimizer in fused:
        optimizer.fused_backward(loss, learning_rate)


def _steps_in_backward(optimizer: Any) -> bool:
    return getattr(optimizer, "steps_in_backward", False)


def clip_grad_norm(
    session: Session, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float
) -> Tensor | None:
    """Scale gradients down to a total norm, and return the norm before, or None if the backend clips itself."""
    scale = _complete_to_clip(session)
    strategy, listed = session.strategy, _listed(parameters)
    if scale is None:
        return strategy.clip_norm(listed, max_norm, norm_type)
    norm = strategy.clip_norm(listed, max_norm * scale, norm_type)
    return None if norm is None else norm / scale


def clip_grad_value(session: Session, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
    """Clamp every element of the gradients."""
    session.backend.demand("clip_value")
    scale = _complete_to_clip(session)
    listed = _listed(parameters)
    if scale is not None:
        _mark_overflows(listed)
        clip_value = clip_value * scale
    session.strategy.clip_value(listed, clip_value)


def _complete_to_clip(session: Session) -> float | None:
    """Complete and unscale the gradients; or, inside a window, return the loss scale by which they stay multiplied.

    The next micro-batches of the window add gradients with this scale.
    """
    scaler = None if session.backend.capabilities.own_precision else session.precision.scaler
    if scaler is None or not scaler.is_enabled() or session.gradient.sync_gradients:
        unscale_gradients(session)
        return None
    for wrapped in session.prepared.optimizers:
        complete(session.strategy, session.accumulation, inner_optimizer(wrapped))
    return scaler.get_scale()


def _mark_overflows(parameters: Iterable[Tensor]) -> None:
    """Make infinite elements of gradients NaN, which no clamp hides from the scaler."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            gradient.add_(gradient - gradient)


def _listed(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    """Parameters as a list, because a generator can be read only once."""
    import torch

    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
