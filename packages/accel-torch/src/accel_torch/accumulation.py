"""Gradient accumulation: at which micro-batches gradients are synchronised between the processes.

Each Accelerator counts the micro-batches of its window. Optimizers and schedulers read the position from its gradient
state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from accel_plugins.layers import strategy_model
from accel_plugins.precision.base import Precision
from accel_plugins.strategy import Strategy
from accel_state import current
from accel_state.errors import Conflict, NotOffered, NotReady, SettingError
from accel_torch.hooks import Hook

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from accel_plugins.shards import BatchShare
    from accel_state.gradient import GradientState, Iterating
    from accel_torch.hooks import Hooks
    from accel_torch.weighting import LossReduction, TokenWeighting

__all__ = ("Accumulation", "MicroBatch", "StepsOfShares", "share_of_step")


class Accumulation:
    """The position in the current window of micro-batches.

    Attributes:
        step: micro-batches of the window so far, the current one included; 0 after the last batch of a loader.
        weighting: the weights of the window, once a micro-batch had one.
        factor: multiplies the loss of the current micro-batch if it has a weight.
        first: whether the current micro-batch is the first of its window.
        elastic: whether the world size may change during the run.
        can_hold_back: whether the strategy implements `no_sync`.
        only_counts: whether a micro-batch is only counted, unless there are hooks; if so, this object is the context
            manager of all of them.
        plain: whether backward only divides the loss by the number of micro-batches, unless there are hooks.
    """

    __slots__ = (
        "_counted_by_strategy",
        "_followed",
        "_plain_backward",
        "_received",
        "can_hold_back",
        "elastic",
        "factor",
        "first",
        "gradient",
        "hooks",
        "only_counts",
        "plain",
        "step",
        "strategy",
        "weighting",
    )

    def __init__(self, gradient: GradientState, strategy: Strategy, hooks: Hooks) -> None:
        self.gradient = gradient
        self.hooks = hooks
        self.strategy = strategy
        self.step = 0
        # The loader that gave the last micro-batch, and how many batches it had yielded, if several were open.
        self._followed = 0
        self._received: int | None = None
        self.can_hold_back = strategy.overrides("no_sync")
        self._counted_by_strategy = strategy.capabilities.own_accumulation
        scales = type(strategy.context.precision).backward_scale is not Precision.backward_scale
        plain_backward = not strategy.overrides("backward") and not scales
        self._plain_backward = plain_backward and not self._counted_by_strategy
        self.elastic = strategy.capabilities.elastic
        self.first = True
        self.weighting: TokenWeighting | None = None
        self.factor: float | None = None
        self._simplify()

    def _simplify(self) -> None:
        """Decide what a micro-batch can do without; a step pays for every check, and most runs need none."""
        simple = self.weighting is None and not self.elastic
        self.plain = simple and self._plain_backward
        self.only_counts = simple and not self.can_hold_back

    def __enter__(self) -> None:
        """Enter the next micro-batch and decide whether its gradients are synchronised."""
        gradient = self.gradient
        plugin, loaders = gradient.plugin, gradient.loaders
        ends = False
        if loaders and plugin.sync_with_dataloader:
            # A step feels a call more, and most loops read one loader.
            loader = loaders[0] if len(loaders) == 1 else self._loader_of_batch(loaders)
            self._followed = id(loader)
            ends = loader.end_of_dataloader
        if ends:
            self.step = 0
            gradient.sync_gradients = True
        else:
            self.step = step = self.step + 1
            gradient.sync_gradients = step % (plugin.num_steps or 1) == 0

    def _loader_of_batch(self, loaders: list[Iterating]) -> Iterating:
        """The loader, of several that are read, that gives this micro-batch.

        It is the loader that gave the last micro-batch, if it has yielded since: an iterator that the script advances
        by hand may have yielded after it. Else it is the one that yielded last.
        """
        loader = loaders[-1]
        for other in loaders:
            if id(other) == self._followed and _received(other) != self._received:
                loader = other
        self._received = _received(loader)
        return loader

    # Nothing is left to do. A C function that takes any arguments and returns a false value is the fastest.
    __exit__: ClassVar[Any] = "".format

    def forbid_plain_backward(self) -> None:
        """Note that an optimizer steps in backward, which then does more than to divide the loss."""
        self._plain_backward = self.plain = False

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss of this micro-batch, scaled to its share of the window; unscaled if the strategy divides it."""
        if self.elastic and (share := share_of_step(self.strategy, self.gradient)) is not None:
            if not share.accumulated:
                raise NotReady(
                    "Cannot compute gradients outside accelerator.accumulate() in a run whose world size may change.",
                    "The number of micro-batches of the step depends on how many processes share it.",
                    "Put forward, backward and step inside `with accelerator.accumulate(model):`.",
                )
            return loss * share.factor
        if self.factor is not None:
            return loss * self.factor
        steps = self.gradient.plugin.num_steps or 1
        return loss if steps == 1 or self._counted_by_strategy else loss / steps

    def set_weight(self, weight: float | Tensor, loss_reduction: LossReduction) -> None:
        """Give the current micro-batch a weight.

        Raises:
            NotOffered: the strategy accumulates gradients itself.
            SettingError: `loss_reduction` is neither "mean" nor "sum".
        """
        if self._counted_by_strategy:
            raise NotOffered(
                "Cannot weight micro-batches with accumulate(model, weight=...).",
                "The backend of this run accumulates gradients itself, and divides by the number of micro-batches.",
                "Remove the weight, or use another backend.",
            )
        if self.elastic:
            raise NotOffered(
                "Cannot weight micro-batches with accumulate(model, weight=...).",
                "The world size of this run may change, so micro-batches are weighted by their number of samples.",
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

            self._refuse_mixing(not self.first)
            self.weighting = TokenWeighting(current.process())
            self.hooks.enter(self.weighting)
            self._simplify()
        self.factor = self.weighting.enter(weight, loss_reduction, last=self.gradient.sync_gradients)

    def clear_weight(self) -> None:
        """Note that the current micro-batch has no weight.

        Raises:
            Conflict: other micro-batches of its window have a weight.
        """
        if self.weighting is not None:
            self._refuse_mixing(self.weighting.unfinished)
            self.hooks.leave(self.weighting)
            self.weighting = None
            self._simplify()

    @staticmethod
    def _refuse_mixing(mixed: bool) -> None:
        if mixed:
            raise Conflict(
                "Cannot weight micro-batches with accumulate(model, weight=...).",
                "Some micro-batches of this window have a weight and others have none.",
                "Give every micro-batch a weight, or none.",
            )


def _received(loader: Any) -> int | None:
    """How many batches a loop has received from a prepared loader; None for a loader of another library."""
    progress = getattr(loader, "progress", None)
    return None if progress is None else progress.received


def share_of_step(strategy: Strategy, gradient: GradientState) -> BatchShare | None:
    """The share of the newest batch in the optimizer step; for runs whose world size may change.

    Raises:
        Conflict: the loader does not follow optimizer steps.
    """
    loader = gradient.active_dataloader
    if loader is None:
        return None
    share = strategy.share_of_batch(loader)
    if share is None:
        raise Conflict(
            "Cannot train on this batch.",
            "No prepared model was in training mode when the epoch of its loader began, so the loader does not "
            "follow the optimizer steps.",
            "Call model.train() before the loop that trains.",
        )
    return share


class StepsOfShares(Hook):
    """Notes each call of an optimizer's `step` for the loader, in runs whose world size may change."""

    def __init__(self, strategy: Strategy, gradient: GradientState) -> None:
        self._strategy, self._gradient = strategy, gradient

    def before_step(self, optimizer: Optimizer) -> None:
        """Mark the share of the newest batch as stepped."""
        share = share_of_step(self._strategy, self._gradient)
        if share is not None:
            share.stepped = True


class MicroBatch:
    """Context manager of one micro-batch that is not only counted. Each has its own, so that blocks may be nested.

    Attributes:
        accumulation: the position in the window, which the block advances.
        models: prepared models; their gradients are synchronised only at the last micro-batch of a window.
        weight: the weight of the micro-batch, or None.
        loss_reduction: whether a loss with a weight is the mean or the sum over its tokens.
    """

    # `Accelerator.accumulate` sets these attributes: a constructor would add a call to each step.
    accumulation: Accumulation
    models: tuple[Module, ...]
    weight: float | Tensor | None = None
    loss_reduction: LossReduction = "mean"
    _held: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        """Enter the next micro-batch and decide whether its gradients are synchronised."""
        accumulation = self.accumulation
        gradient = accumulation.gradient
        accumulation.first = gradient.sync_gradients
        if accumulation.elastic and (share := share_of_step(accumulation.strategy, gradient)) is not None:
            share.accumulated = True
            gradient.sync_gradients = share.last
        else:
            accumulation.__enter__()
        for begin_micro_batch in accumulation.hooks.begin_micro_batch:
            begin_micro_batch()
        if self.weight is not None:
            accumulation.set_weight(self.weight, self.loss_reduction)
        elif accumulation.weighting is not None:
            accumulation.clear_weight()
        if not gradient.sync_gradients and accumulation.can_hold_back and not gradient.plugin.sync_each_batch:
            self._held = no_sync_all(accumulation.strategy, self.models)
            self._held.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.weight is not None:
            self.accumulation.factor = None
        if self._held is not None:
            self._held.__exit__(kind, error, trace)


def no_sync_all(strategy: Strategy, models: tuple[Module, ...]) -> AbstractContextManager[object]:
    """Context manager in which gradients of these models are not synchronised between processes."""
    if len(models) == 1:
        return strategy.no_sync(strategy_model(models[0]))
    return _no_sync_each(strategy, [strategy_model(model) for model in models])


@contextmanager
def _no_sync_each(strategy: Strategy, models: list[Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(strategy.no_sync(model))
        yield
