"""One optimizer step, from the loss to complete, clipped gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.errors import NotOffered, SettingError, UnknownKind

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_torch.session import Session

__all__ = ("clip_grad_norm", "clip_grad_value", "fused_backward", "unscale_gradients")


def complete(session: Session, optimizer: Optimizer) -> None:
    """Complete an optimizer's gradients over the window and all processes; a repeated call changes nothing."""
    for before_gradients_complete in session.hooks.before_gradients_complete:
        before_gradients_complete()
    session.strategy.finalize_gradients(optimizer)
    if session.accumulation.weighting is not None:
        session.accumulation.weighting.before_step(optimizer)


def unscale_gradients(session: Session, optimizers: Iterable[Any] | None = None) -> None:
    """Complete the gradients of prepared optimizers and divide them by the loss scale; None means all of them."""
    for wrapped in session.prepared.optimizers if optimizers is None else optimizers:
        optimizer: Optimizer = inner_optimizer(wrapped)
        complete(session, optimizer)
        if not session.backend.capabilities.own_precision:
            session.precision.unscale(optimizer)


def fused_backward(session: Session, loss: Tensor, learning_rate: float | None) -> None:
    """Backward in which optimizers such as LOMO update each parameter as soon as its gradient exists.

    Raises:
        SettingError: `learning_rate` is None, or no such optimizer was prepared.
        NotOffered: the run has several processes or accumulates gradients.
    """
    fused = [optimizer for optimizer in session.prepared.optimizers if _steps_in_backward(optimizer)]
    failure = "Cannot step the optimizer during backward (LOMO)."
    if not fused:
        raise SettingError(
            failure,
            "No prepared optimizer supports it.",
            "Prepare a Lomo or AdaLomo optimizer, or call backward(loss) without learning_rate.",
        )
    if learning_rate is None:
        raise SettingError(
            failure,
            "The learning rate is missing.",
            "Call backward(loss, learning_rate=...), which also steps the optimizer.",
        )
    if session.gradient.num_steps > 1 or session.state.use_distributed:
        raise NotOffered(
            failure,
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
    for before_clip in session.hooks.before_clip:
        before_clip(session)
    scale = _complete_to_clip(session)
    limit = max_norm if scale is None else max_norm * scale
    if session.guard is not None and session.gradient.sync_gradients:
        norm = session.guard.clip(_listed(parameters), limit, norm_type)
    else:
        norm = session.strategy.clip_norm(_listed(parameters), limit, norm_type)
    if norm is not None and scale is not None:
        norm = norm / scale
    for after_clip in session.hooks.after_clip:
        after_clip(norm)
    return norm


def clip_grad_value(session: Session, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
    """Clamp every element of the gradients."""
    session.backend.demand("clip_value")
    scale = _complete_to_clip(session)
    listed = _listed(parameters)
    if session.guard is not None and session.gradient.sync_gradients:
        # Clamping hides infinite gradients.
        session.guard.measure()
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
        complete(session, inner_optimizer(wrapped))
    return scaler.get_scale()


def _mark_overflows(parameters: Iterable[Tensor]) -> None:
    """Make infinite elements of gradients NaN, which no clamp hides from the scaler."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            gradient.add_(gradient - gradient)


def _listed(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    """Parameters as a list, because a generator can be read only once.

    Raises:
        UnknownKind: it is a model.
    """
    import torch

    if isinstance(parameters, torch.nn.Module):
        raise UnknownKind(
            f"Cannot clip the gradients of a {type(parameters).__name__}.",
            "A model is not a list of parameters.",
            "Pass model.parameters().",
        )
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
