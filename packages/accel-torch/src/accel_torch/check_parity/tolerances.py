"""How far sums of the same terms may differ when several processes add them in another order.

A sum of n terms with a relative rounding error of at most `eps` each has an error of about `sqrt(n) * eps` times the
size of its terms (random signs; Higham, Accuracy and Stability of Numerical Algorithms, section 2.8). The terms of a
gradient are unknown; their size is estimated by the largest gradient in the same module. `SAFETY` covers errors that
accumulate over layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

__all__ = ("SAFETY", "Tolerance", "elements_per_row", "update_tolerance")

SAFETY: Final = 16.0

_LOW: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""The dtype of computation, by mixed precision."""

_OF_THE_MODEL: Final = 1e-3
"""The smallest size of a gradient's terms, as a fraction of the model's largest gradient."""


class Tolerance:
    """The tolerances of one run.

    Args:
        precision: name of the mixed precision.
        terms: the number of terms in a gradient, by module: samples times positions of the global batch.
    """

    def __init__(self, precision: str, terms: Mapping[str, float]) -> None:
        self._low = torch.finfo(_LOW[precision]).eps if precision in _LOW else 0.0
        self._terms = dict(terms)
        self._most = max(self._terms.values(), default=1.0)

    def relative(self, dtype: torch.dtype, module: str | None = None) -> float:
        """Largest difference, as a fraction of the size of the terms.

        Args:
            dtype: dtype of the sum.
            module: the module of the gradient; if None or unknown, the module with most terms.
        """
        terms = self._most if module is None else self._terms.get(module, self._most)
        eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        if dtype in (torch.bfloat16, torch.float16):
            # Sums are accumulated in float32, then rounded.
            eps, low = torch.finfo(torch.float32).eps, max(self._low, eps)
        else:
            low = self._low
        return SAFETY * eps * (1 + math.sqrt(max(terms, 1.0))) + SAFETY / 2 * low

    @property
    def is_mixed(self) -> bool:
        """Whether forward and backward compute in 16 bits."""
        return self._low > 0

    def of_gradients(self, gradients: Mapping[str, Tensor]) -> dict[str, float]:
        """The largest absolute difference of each gradient."""
        largest = {name: _largest(gradient) for name, gradient in gradients.items()}
        modules: dict[str, float] = {}
        for name, value in largest.items():
            module = name.rpartition(".")[0]
            modules[module] = max(modules.get(module, 0.0), value)
        floor = _OF_THE_MODEL * max(largest.values(), default=0.0)
        return {
            name: self.relative(gradient.dtype, name.rpartition(".")[0])
            * max(modules[name.rpartition(".")[0]], floor, 1e-30)
            for name, gradient in gradients.items()
        }


def update_tolerance(
    before: Tensor, after: Tensor, gradient: Tensor | None, gradient_tolerance: float, relative: float
) -> Tensor:
    """The largest difference of each element of a parameter after a step.

    An optimizer may divide by the size of a gradient, as Adam does. The update of an element then has the relative
    error of its gradient, and an element whose gradient is only rounding error gets an update of either sign.

    Args:
        before, after: the parameter before and after the step.
        gradient: the gradient with which the optimizer stepped, or None.
        gradient_tolerance: the largest difference of the gradient.
        relative: largest difference of sums of this dtype, as a fraction of the size of their terms.
    """
    update = (after.double() - before.double()).abs()
    most = float(update.max()) if update.numel() else 0.0
    eps = torch.finfo(after.dtype).eps if after.dtype.is_floating_point else 0.0
    allowed = torch.full_like(update, 4 * eps * _largest(after) + 2 * relative * most)
    if gradient is None or gradient.shape != after.shape:
        return allowed
    size = gradient.double().abs()
    share = (2 * gradient_tolerance / size.clamp(min=1e-300)).clamp(max=1.0)
    noise = size <= 8 * gradient_tolerance
    return allowed + torch.where(noise, 2.1 * most, update * share)


def elements_per_row(shape: torch.Size) -> int:
    """Number of features at one position of an output: the channels of an image, otherwise the last dimension."""
    return int(shape[1] if len(shape) > 3 else shape[-1]) if len(shape) else 1


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
