"""Gradient accumulation: at which micro-batches gradients are synchronised between the processes.

The position inside a window of micro-batches belongs to one Accelerator; its gradient state tells it to optimizers and
schedulers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from accel_plugins.layers import strategy_model
from accel_state import current
from accel_state.errors import Conflict, NotOffered, NotReady, SettingError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from accel_data.elastic import MicroBatchShare
    from accel_plugins.strategy import Strategy
    from accel_state.gradient import GradientState
    from accel_torch.misuse import MisuseGuard
    from accel_torch.weighting import LossReduction, TokenWeighting

__all__ = ("Accumulation", "MicroBatch", "WeightedMicroBatch")


class Accumulation:
    """The position in the current window of micro-batches.

    Attributes:
        step: micro-batches of the window so far, the current one included; 0 after the last batch of a loader.
        weighting: the weights of the window, once a micro-batch had one.
        guard: watches the first steps for misuse; None once it has seen them.
        factor: what the loss of the current micro-batch is multiplied by, where it has a weight.
    """

    __slots__ = (
        "_counted_by_strategy",
        "_elastic",
        "_first",
        "factor",
        "gradient",
        "guard",
        "step",
        "strategy",
        "weighting",
    )

    def __init__(self, gradient: GradientState, strategy: Strategy, counted_by_strategy: bool = False) -> None:
        self.gradient = gradient
        self.strategy = strategy
        self.step = 0
        self._counted_by_strategy = counted_by_strategy
        self._elastic = strategy.traits.elastic
        self._first = True
        self.guard: MisuseGuard | None = None
        self.weighting: TokenWeighting | None = None
        self.factor: float | None = None

    def advance(self) -> None:
        """Enter the next micro-batch and decide whether its gradients are synchronised."""
        gradient = self.gradient
        self._first = gradient.sync_gradients
        share = self._elastic_share() if self._elastic else None
        if share is not None:
            share.accumulated = True
            gradient.sync_gradients = share.last
        elif (plugin := gradient.plugin).sync_with_dataloader and gradient.end_of_dataloader:
            self.step = 0
            gradient.sync_gradients = True
        else:
            self.step += 1
            gradient.sync_gradients = self.step % (plugin.num_steps or 1) == 0
        if self.guard is not None:
            self._note_micro_batch(self.guard)

    def _note_micro_batch(self, guard: MisuseGuard) -> None:
        if guard.active:
            guard.micro_batch_begins()
        else:
            self.guard = None

    def share(self, loss: Tensor) -> Tensor:
        """The part of the window's loss that the loss of this micro-batch is; the same where the strategy divides."""
        if self.guard is not None:
            self.guard.backward_ran = True
        if self._elastic and (elastic := self._elastic_share()) is not None:
            if not elastic.accumulated:
                raise NotReady(
                    "Cannot compute gradients of a step whose members may change.",
                    "The number of micro-batches of the step depends on how many processes share it.",
                    "Put forward, backward and step inside `with accelerator.accumulate(model):`.",
                )
            return loss * elastic.factor
        if self.factor is not None:
            return loss * self.factor
        steps = self.gradient.plugin.num_steps or 1
        return loss if steps == 1 or self._counted_by_strategy else loss / steps

    def _elastic_share(self) -> MicroBatchShare | None:
        """The part of the optimizer step that the newest batch is; for runs whose members may change.

        Raises:
            Conflict: the loader does not follow optimizer steps.
        """
        loader: Any = self.gradient.active_dataloader
        if loader is None:
            return None
        share: MicroBatchShare | None = getattr(loader, "share", None)
        if share is None:
            raise Conflict(
                "Cannot train on this batch.",
                "No prepared model was in training mode when the epoch of its loader began, so the loader does not "
                "follow the optimizer steps.",
                "Call model.train() before the loop that trains.",
            )
        return share

    def note_step(self) -> None:
        """Note that the loop tried to step an optimizer, where the members of the run may change."""
        share = self._elastic_share()
        if share is not None:
            share.stepped = True

    def weigh(self, weight: float | Tensor, loss_reduction: LossReduction) -> None:
        """Give the current micro-batch a weight.

        Raises:
            NotOffered: the strategy counts micro-batches by itself.
            SettingError: `loss_reduction` is neither "mean" nor "sum".
        """
        if self._counted_by_strategy:
            raise NotOffered(
                "Cannot weight micro-batches with accumulate(model, weight=...).",
                "The backend of this run accumulates itself, and divides by the number of micro-batches.",
                "Remove the weight, or use another backend.",
            )
        if self._elastic:
            raise NotOffered(
                "Cannot weight micro-batches with accumulate(model, weight=...).",
                "The members of this run may change, so micro-batches are weighted by their samples.",
                "Remove the weight, or use another backend.",
            )
        if loss_reduction not in ("mean", "sum"):
            raise SettingError(
                f"Cannot accumulate with loss_reduction={loss_reduction!r}.",
                "The loss of a micro-batch must be the mean or the sum over its tokens.",
                "Give 'mean' or 'sum'.",
            )
        if self.weighting is None:
            from accel_torch.weighting import TokenWeighting

            self._refuse_mixing(not self._first)
            self.weighting = TokenWeighting(current.process())
        self.factor = self.weighting.enter(weight, loss_reduction, last=self.gradient.sync_gradients)

    def do_not_weigh(self) -> None:
        """Note that the current micro-batch has no weight.

        Raises:
            Conflict: others of its window have one.
        """
        if self.weighting is not None:
            self._refuse_mixing(self.weighting.unfinished)
            self.weighting = None

    @staticmethod
    def _refuse_mixing(mixed: bool) -> None:
        if mixed:
            raise Conflict(
                "Cannot weight micro-batches with accumulate(model, weight=...).",
                "Some micro-batches of this window have a weight and others have none.",
                "Give every micro-batch a weight, or none.",
            )


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
        if accumulation.weighting is not None:
            accumulation.do_not_weigh()
        if not accumulation.gradient.sync_gradients:
            self._enter_no_sync()

    def _enter_no_sync(self) -> None:
        accumulation = self._accumulation
        if not accumulation.gradient.plugin.sync_each_batch:
            self._held = no_sync_all(accumulation.strategy, self._models)
            self._held.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held is not None:
            self._held.__exit__(kind, error, trace)


class WeightedMicroBatch(MicroBatch):
    """The block of one micro-batch that has a weight."""

    __slots__ = ("_loss_reduction", "_weight")

    def __init__(
        self,
        accumulation: Accumulation,
        models: tuple[Module, ...],
        weight: float | Tensor,
        loss_reduction: LossReduction,
    ) -> None:
        super().__init__(accumulation, models)
        self._weight, self._loss_reduction = weight, loss_reduction

    def __enter__(self) -> None:
        self._accumulation.advance()
        self._accumulation.weigh(self._weight, self._loss_reduction)
        if not self._accumulation.gradient.sync_gradients:
            self._enter_no_sync()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._accumulation.factor = None
        super().__exit__(kind, error, trace)


def no_sync_all(strategy: Strategy, models: tuple[Module, ...]) -> AbstractContextManager[object]:
    """A block in which the gradients of the models are not synchronised between the processes."""
    if len(models) == 1:
        return strategy.no_sync(strategy_model(models[0]))
    stack = ExitStack()
    for model in models:
        stack.enter_context(strategy.no_sync(strategy_model(model)))
    return stack
