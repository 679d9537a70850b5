"""Losses with weights of their own: several denominators in one optimizer step.

A language-model loss counts by tokens and an auxiliary loss by samples. Each is a mean over its own units, so each is
divided by its own sum over all processes, which is known at the last micro-batch of a window. The losses of a
micro-batch are kept until it ends.

At the last micro-batch, the sums are exchanged, and one backward pass computes the gradients of all losses. At an
earlier one, the sums are still unknown. There, each loss has a backward pass of its own, and its gradients are kept
apart from those of the others; the last micro-batch adds them, each multiplied by what is known then.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from accel_plugins.layers import strategy_model
from accel_state.errors import Conflict, NotOffered
from accel_state.protocol.call import start_all_gather_bytes
from accel_torch.hooks import Hook
from accel_torch.weighting import power_of_two_near

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from accel_plugins.strategy import Strategy
    from accel_state.current import Process
    from accel_state.gradient import GradientState
    from accel_torch.weighting import LossReduction, TokenWeighting

__all__ = ("LossWeights",)

Backward = Callable[..., None]
"""`f(loss, **options)` computes the gradients of a loss; the options are those of `Tensor.backward`."""


class _Window(Protocol):
    """What is used of an `Accumulation`, which is above this module."""

    gradient: GradientState
    strategy: Strategy
    models: tuple[Module, ...]
    weighting: TokenWeighting | None
    factor: float | None
    first: bool

    def set_weight(self, weight: float, loss_reduction: LossReduction, last: bool | None = None) -> None:
        """Give the current micro-batch a weight."""

    def refuse_mixing(self, mixed: bool) -> None:
        """Raise an error if some micro-batches of a window have weights and others have none."""


class LossWeights(Hook):
    """The losses of the current micro-batch whose gradients are still to be computed, and the sums of the window.

    Args:
        accumulation: the position in the window.
        process: this process and its transport.
        optimizers: those that use the gradients.

    Attributes:
        apart: during a backward pass whose gradients are kept apart, the number of its loss; else None.
        scales: by loss, the factor of the gradients that were kept apart in the window that ended last.
    """

    def __init__(self, accumulation: _Window, process: Process, optimizers: Sequence[Optimizer]) -> None:
        self._accumulation, self._process, self._optimizers = accumulation, process, optimizers
        self._losses: list[tuple[Tensor, float]] = []
        self._backward: Backward | None = None
        self._first = self._last = True
        # By loss: the sum of the weights in a window with several losses so far; empty between two windows.
        self._sums: list[float] = []
        self._micro_batches = 0
        # By loss: what its weights are divided by, so that gradients do not overflow; equal on all processes.
        self._units: list[float] = []
        # By loss: its gradients from earlier micro-batches of the window, by parameter.
        self._apart: list[dict[Tensor, Tensor]] = []
        self.apart: int | None = None
        self.scales: list[float] = []

    @property
    def pending(self) -> bool:
        """Whether there are losses whose gradients are not computed, or a window with several losses is open."""
        return bool(self._losses or self._sums)

    def add(self, loss: Tensor, weight: float | Tensor, backward: Backward) -> None:
        """Keep a loss.

        Args:
            loss: the mean over its tokens or samples.
            weight: how many these are.
            backward: computes the gradients of a loss.
        """
        self._losses.append((loss, float(weight)))
        self._backward = backward
        self._first, self._last = self._accumulation.first, self._accumulation.gradient.sync_gradients

    def begin_micro_batch(self, models: Sequence[Module]) -> None:
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
        try:
            if len(losses) == 1 and not self._sums:
                accumulation.set_weight(losses[0][1], "mean", self._last)
                backward(losses[0][0])
            else:
                self._compute_several(losses, backward)
        finally:
            accumulation.factor = None

    def _compute_several(self, losses: list[tuple[Tensor, float]], backward: Backward) -> None:
        accumulation, weights = self._accumulation, [weight for _, weight in losses]
        if not self._sums:
            accumulation.refuse_mixing(not self._first)
            self._sums, self._apart = [0.0] * len(weights), [{} for _ in weights]
        # A micro-batch with another number of losses has no sums; the exchange tells all processes.
        alike = len(weights) == len(self._sums)
        self._sums = [total + weight for total, weight in zip(self._sums, weights, strict=True)] if alike else []
        self._micro_batches += 1
        if not self._last and len(self._units) != len(weights):
            self._units = self._mean_weights(self._exchanged(weights), 1)
        accumulation.factor = 1.0
        if not self._last and alike:
            for number, (loss, weight) in enumerate(losses):
                with self._kept_apart(number):
                    options = {"retain_graph": True} if number + 1 < len(losses) else {}
                    backward(loss * (weight / self._units[number]), **options)
            return
        micro_batches, apart = self._micro_batches, self._apart
        try:
            totals = self._exchanged(self._sums)
        finally:
            self._sums, self._apart, self._micro_batches = [], [], 0
        # Backward averages over the processes. Without tokens the gradient is zero.
        factors = [self._process.world_size / total if total else 0.0 for total in totals]
        if micro_batches > 1:
            self.scales = [factor * unit for factor, unit in zip(factors, self._units, strict=True)]
            for gradients, scale in zip(apart, self.scales, strict=True):
                _add(gradients, scale)
            self._units = self._mean_weights(totals, micro_batches)
        backward(sum(loss * (weight * factor) for (loss, weight), factor in zip(losses, factors, strict=True)))

    def _mean_weights(self, totals: list[float], micro_batches: int) -> list[float]:
        """For each loss, the power of two nearest to the mean weight of a micro-batch."""
        return [power_of_two_near(total, micro_batches * self._process.world_size) for total in totals]

    @contextmanager
    def _kept_apart(self, number: int) -> Iterator[None]:
        """Block whose backward pass adds to the gradients of a loss, and not to those of the optimizers' parameters.

        Raises:
            NotOffered: the backend could not compute a second backward pass of the same forward.
        """
        parameters = [p for one in self._optimizers for group in one.param_groups for p in group["params"]]
        before = [parameter.grad for parameter in parameters]
        accumulation, gradients = self._accumulation, self._apart[number]
        with ExitStack() as stack:
            for model in map(strategy_model, accumulation.models):
                if accumulation.strategy.passes_are_local(model) and not accumulation.gradient.plugin.sync_each_batch:
                    continue
                self._check_second_pass(accumulation.strategy)
                stack.enter_context(accumulation.strategy.sync_in_next_backward(model))
            try:
                for parameter in parameters:
                    parameter.grad = gradients.get(parameter)
                self.apart = number
                yield
            finally:
                self.apart = None
                for parameter, grad in zip(parameters, before, strict=True):
                    if parameter.grad is not None:
                        gradients[parameter] = parameter.grad
                    parameter.grad = grad

    def _check_second_pass(self, strategy: Strategy) -> None:
        # DistributedDataParallel reduces once for each forward, and a flat parameter is freed after a backward.
        if self._process.world_size > 1 and not strategy.capabilities.per_parameter_sharding:
            raise NotOffered(
                "Cannot compute gradients of several losses with backward(loss, weight=...).",
                "In all micro-batches of a window but the last, each loss has a backward pass of its own. In this run "
                "a second one of the same forward cannot be reduced over the processes (FSDP1, static_graph or "
                "sync_each_batch).",
                "Use one micro-batch for each step, another backend or setting, or one weight for all losses.",
            )

    def _exchanged(self, weights: list[float]) -> list[float]:
        """The sum of each weight over all processes.

        Raises:
            Conflict: the numbers of losses differ, or a weight is negative or not finite; raised on all processes.
        """
        sent = struct.pack(f"<{len(weights)}d", *weights)
        rows = start_all_gather_bytes(self._process.transport, "backward", sent).wait()
        everyones = [struct.unpack(f"<{len(row) // 8}d", row) for row in rows]
        counts = [len(row) for row in everyones]
        if 0 in counts:
            raise Conflict(
                "Cannot compute gradients of losses with backward(loss, weight=...).",
                f"The micro-batches of a window have different numbers of losses on process {counts.index(0)}.",
                "Call backward equally often in all of them; a loss without tokens has the weight 0.",
            )
        if len(set(counts)) > 1:
            raise Conflict(
                "Cannot compute gradients of losses with backward(loss, weight=...).",
                f"The processes have {', '.join(map(str, counts))} losses.",
                "Call backward equally often on all processes; a loss without tokens has the weight 0.",
            )
        wrong = [rank for rank, row in enumerate(everyones) if not all(0 <= weight < math.inf for weight in row)]
        if wrong:
            raise Conflict(
                "Cannot compute gradients of losses with backward(loss, weight=...).",
                f"A weight is negative or not finite on process {', '.join(map(str, wrong))}.",
                "Give the number of tokens or samples in the loss.",
            )
        return [sum(column) for column in zip(*everyones, strict=True)]


def _add(gradients: dict[Any, Tensor], factor: float) -> None:
    """Add multiples of gradients to those of their parameters."""
    for parameter, gradient in gradients.items():
        gradient.mul_(factor)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
