"""Signs of faults that one process has as well, which no comparison can show."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from accel_check.models import Models

__all__ = ("divisor_of", "unchanged_copies")

_MOST: Final = 20


def divisor_of(loss: Tensor) -> float:
    """By what a loss was divided after it was computed: the product of the last divisions and multiplications."""
    divisor, node = 1.0, loss.grad_fn
    for _ in range(_MOST):
        kind = type(node).__name__
        if node is None or kind not in ("DivBackward0", "MulBackward0"):
            break
        other: Any = getattr(node, "_saved_other", None)
        parents = [one for one, _ in node.next_functions if one is not None]
        if len(parents) != 1:
            break
        value = float(other) if isinstance(other, (int, float)) or _is_number(other) else 0.0
        if not value:
            break
        divisor = divisor * value if kind == "DivBackward0" else divisor / value
        node = parents[0]
    return divisor


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad


def unchanged_copies(frame: FrameType | None, script: str, models: Models, seen: dict[str, Any]) -> None:
    """Note modules of the script that have the shapes of a trained model, and whether they ever change.

    Args:
        frame: the innermost running frame.
        script: the script's file.
        models: the models that are trained.
        seen: for each variable, whether it has changed, and its values.
    """
    trained = {id(parameter) for _, parameter in models.parameters()}
    shapes = sorted(tuple(parameter.shape) for _, parameter in models.parameters() if parameter.requires_grad)
    while frame is not None:
        if frame.f_code.co_filename == script:
            for name, value in list(frame.f_locals.items()):
                if not isinstance(value, nn.Module) or any(id(one) in trained for one in value.parameters()):
                    continue
                if sorted(tuple(one.shape) for one in value.parameters()) != shapes:
                    continue
                now = [one.detach().clone() for one in value.parameters()]
                changed, before = seen.get(name, (False, now))
                changed = changed or any(not torch.equal(one, two) for one, two in zip(now, before, strict=True))
                seen[name] = changed, now
        frame = frame.f_back
