"""One optimizer step, from the loss to complete, clipped gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from accel_plugins.manifest import Duty

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_torch.parts import Parts

__all__ = ("clip_grad_norm", "clip_grad_value", "unscale_gradients")


def unscale_gradients(parts: Parts, optimizers: Iterable[Any] | None = None) -> None:
    """Make the gradients of prepared optimizers complete and bring them to their true size; all of them when None."""
    engine = parts._engine
    for wrapped in parts._registry.optimizers if optimizers is None else optimizers:
        optimizer: Optimizer = getattr(wrapped, "optimizer", wrapped)
        engine.strategy.before_gradients_are_read(optimizer)
        if not engine.owns(Duty.PRECISION):
            engine.precision.unscale(optimizer)


def clip_grad_norm(
    parts: Parts, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float
) -> Tensor | None:
    """Scale gradients down to a total norm; the norm before, or None when the engine clips by itself."""
    unscale_gradients(parts)
    return parts._engine.strategy.clip_norm(_listed(parameters), max_norm, norm_type)


def clip_grad_value(parts: Parts, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
    """Cut every element of the gradients."""
    unscale_gradients(parts)
    parts._engine.strategy.clip_value(_listed(parameters), clip_value)


def _listed(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    """Parameters as a list: a generator could be read only once."""
    import torch

    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
