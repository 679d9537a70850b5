"""Gradient accumulation: at which micro-batches gradients are synchronised between the processes.

The position inside a window of micro-batches belongs to one Accelerator; its gradient state tells it to optimizers and
schedulers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module

    from accel_plugins.strategy import Strategy
    from accel_state.gradient import GradientState

__all__ = ("Accumulation", "MicroBatch")


class Accumulation:
    """The position in the current window of micro-batches.

    Attributes:
        step: micro-batches of the window so far, the current one included; 0 after the last batch of a loader.
    """

    __slots__ = ("_counted_by_strategy", "gradient", "step", "strategy")

    def __init__(self, gradient: GradientState, strategy: Strategy, counted_by_strategy: bool = False) -> None:
        self.gradient = gradient
        self.strategy = strategy
        self.step = 0
        self._counted_by_strategy = counted_by_strategy

    def advance(self) -> None:
        """Enter the next micro-batch and decide whether its gradients are synchronised."""
        gradient = self.gradient
        if gradient.plugin.sync_with_dataloader and gradient.end_of_dataloader:
            self.step = 0
            gradient.sync_gradients = True
        else:
            self.step += 1
            gradient.sync_gradients = self.step % gradient.num_steps == 0

    def divisor(self) -> int:
        """What the loss of each micro-batch is divided by; 1 when the strategy divides by itself."""
        return 1 if self._counted_by_strategy else self.gradient.num_steps


class MicroBatch:
    """The block of one micro-batch; made anew for each, so that blocks may be nested."""

    __slots__ = ("_accumulation", "_held", "_models")

    def __init__(self, accumulation: Accumulation, models: tuple[Module, ...]) -> None:
        self._accumulation = accumulation
        self._models = models
        self._held: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        accumulation = self._accumulation
        accumulation.advance()
        gradient = accumulation.gradient
        if not gradient.sync_gradients and not gradient.plugin.sync_each_batch:
            self._held = hold_back(accumulation.strategy, self._models)
            self._held.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held is not None:
            self._held.__exit__(kind, error, trace)


def hold_back(strategy: Strategy, models: tuple[Module, ...]) -> AbstractContextManager[object]:
    """A block in which the gradients of the models are not synchronised between the processes."""
    if len(models) == 1:
        return strategy.no_sync(models[0])
    stack = ExitStack()
    for model in models:
        stack.enter_context(strategy.no_sync(model))
    return stack
