"""Losses with weights of their own: several denominators in one optimizer step.

A language-model loss counts by tokens and an auxiliary loss by samples. Each is a mean over its own units, so each is
divided by its own sum over all processes. The gradients of both are added into the same tensors, so they cannot be
divided later. The losses of a micro-batch are therefore kept until it ends; then their sums are known, and one backward
pass computes the gradients of all.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from accel_state.errors import Conflict, NotOffered
from accel_state.protocol.call import start_all_gather_bytes
from accel_torch.hooks import Hook

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_state.current import Process
    from accel_state.gradient import GradientState
    from accel_torch.weighting import LossReduction, TokenWeighting

__all__ = ("LossWeights",)


class _Window(Protocol):
    """What is used of an `Accumulation`, which is above this module."""

    gradient: GradientState
    weighting: TokenWeighting | None
    factor: float | None

    def set_weight(self, weight: float, loss_reduction: LossReduction, last: bool | None = None) -> None:
        """Give the current micro-batch a weight."""


class LossWeights(Hook):
    """The losses of the current micro-batch whose gradients are still to be computed.

    Args:
        accumulation: the position in the window.
        process: this process and its transport.
    """

    def __init__(self, accumulation: _Window, process: Process) -> None:
        self._accumulation, self._process = accumulation, process
        self._losses: list[tuple[Tensor, float]] = []
        self._backward: Callable[[Tensor], None] | None = None
        self._last = True

    @property
    def pending(self) -> bool:
        """Whether there are losses whose gradients are not computed."""
        return bool(self._losses)

    def add(self, loss: Tensor, weight: float | Tensor, backward: Callable[[Tensor], None]) -> None:
        """Keep a loss.

        Args:
            loss: the mean over its tokens or samples.
            weight: how many these are.
            backward: computes the gradients of a loss.
        """
        self._losses.append((loss, float(weight)))
        self._backward, self._last = backward, self._accumulation.gradient.sync_gradients

    def begin_micro_batch(self) -> None:
        """Compute what the last micro-batch left, if its block did not."""
        self.compute()

    def before_gradients_complete(self) -> None:
        """Compute before an optimizer steps or gradients are clipped."""
        self.compute()

    def before_step(self, optimizer: Optimizer) -> None:
        """Complete the gradients of losses with one weight."""
        if self._accumulation.weighting is not None:
            self._accumulation.weighting.before_step(optimizer)

    def compute(self) -> None:
        """Compute the gradients of the losses that were kept."""
        losses, backward = self._losses, self._backward
        self._losses, self._backward = [], None
        if not losses or backward is None:
            return
        accumulation = self._accumulation
        if len(losses) == 1:
            accumulation.set_weight(losses[0][1], "mean", self._last)
            total = losses[0][0]
        else:
            factors = self._factors([weight for _, weight in losses])
            accumulation.factor = 1.0
            total = sum(factor * loss for (loss, _), factor in zip(losses, factors, strict=True))  # type: ignore[assignment]
        try:
            backward(total)
        finally:
            accumulation.factor = None

    def _factors(self, weights: list[float]) -> list[float]:
        """The factor of each loss: its weight over the mean weight of all processes.

        Raises:
            NotOffered: the window has several micro-batches.
            Conflict: another process has another number of losses, or a weight is negative or not finite.
        """
        if self._accumulation.gradient.num_steps > 1:
            raise NotOffered(
                "Cannot compute gradients of several losses with backward(loss, weight=...).",
                "The sum of each weight is known only at the last micro-batch of the window, and the gradients of the "
                "losses are not kept apart until then.",
                "Use one micro-batch for each step, or give all losses one weight.",
            )
        sent = struct.pack(f"<{len(weights)}d", *weights)
        rows = start_all_gather_bytes(self._process.transport, "backward", sent).wait()
        everyones = [struct.unpack(f"<{len(row) // 8}d", row) for row in rows]
        counts = [len(row) for row in everyones]
        if len(set(counts)) > 1:
            raise Conflict(
                "Cannot compute gradients of losses with backward(loss, weight=...).",
                f"The processes have {', '.join(map(str, counts))} losses.",
                "Call backward equally often on all processes; a loss without tokens has the weight 0.",
            )
        wrong = [rank for rank, row in enumerate(everyones) if not all(0 <= weight < float("inf") for weight in row)]
        if wrong:
            raise Conflict(
                "Cannot compute gradients of losses with backward(loss, weight=...).",
                f"A weight is negative or not finite on process {', '.join(map(str, wrong))}.",
                "Give the number of tokens or samples in the loss.",
            )
        totals = [sum(column) for column in zip(*everyones, strict=True)]
        # Backward averages over the processes. Without tokens the gradient is zero.
        return [len(rows) * own / total if total else 0.0 for own, total in zip(weights, totals, strict=True)]
