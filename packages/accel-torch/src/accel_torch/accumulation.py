"""Gradient accumulation: at which micro-batches gradients are synchronised between the processes.

Each Accelerator counts the micro-batches of its window. Optimizers and schedulers read the position from its gradient
state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    from accel_torch.loss_weights import LossWeights
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
        exact: whether each sample of a loader counts once in the gradient of its step.
        in_block: whether a block of `accumulate` is open.
        loss_weights: the losses of the micro-batch that have weights of their own, once there was one.
        models: the prepared models of the open block of `accumulate`.
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
        "exact",
        "factor",
        "first",
        "gradient",
        "hooks",
        "in_block",
        "loss_weights",
        "models",
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
        self.exact = self.in_block = False
        self.loss_weights: LossWeights | None = None
        self.models: tuple[Module, ...] = ()
        self._simplify()

    def _simplify(self) -> None:
        """Decide what a micro-batch can do without; a step pays for every check, and most runs need none."""
        simple = self.weighting is None and self.loss_weights is None and not (self.elastic or self.exact)
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

    def weigh_samples(self) -> None:
        """Weight the batches of loaders with exact epochs by their samples from now on."""
        self.exact = True
        self._simplify()

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
        factor = self.factor
        if factor is None and self.loss_weights is not None:
            self._forget_loss_weights()
        if factor is None and self.exact:
            factor = self._factor_of_samples()
        if factor is not None:
            return loss * factor
        steps = self.gradient.plugin.num_steps or 1
        return loss if steps == 1 or self._counted_by_strategy else loss / steps

    def _exact_loader(self) -> Any:
        """The loader of this micro-batch, if its epochs are exact; else None."""
        loader: Any = self.gradient.active_dataloader
        if self.in_block:
            # An iterator that the script advances by hand may have yielded after it.
            loader = next((one for one in self.gradient.loaders if id(one) == self._followed), loader)
        return loader if getattr(loader, "exact_epochs", False) else None

    def weight_of(
        self, weight: float | Tensor, loss_reduction: LossReduction = "mean"
    ) -> tuple[float | Tensor, LossReduction]:
        """The weight that the script gave to a micro-batch or a loss, and its reduction; for a stand-in, those of 0."""
        loader = self._exact_loader() if self.exact else None
        return (weight, loss_reduction) if loader is None or not loader.is_stand_in else (0.0, "mean")

    def _factor_of_samples(self) -> float | None:
        """The factor of the loss of a batch that is weighted by its samples; None if its loader has no exact epochs."""
        loader = self._exact_loader()
        if loader is None:
            return None
        own, everyones = loader.step_weights
        shards, steps = loader.source.processes, self.gradient.plugin.num_steps or 1
        if not self.in_block or (steps == 1 and self.weighting is None):
            # This batch is the whole step, so gradients are complete after backward.
            factor = shards * own / everyones if everyones else 0.0
            return factor if self._counted_by_strategy else factor / steps
        # Processes with the same samples count each of them.
        self.set_weight(own, "mean", total=everyones * current.process().world_size / shards)
        return self.factor

    def add_loss(
        self, loss: Tensor, weight: float | Tensor, backward: Callable[..., None], optimizers: Sequence[Optimizer]
    ) -> None:
        """Add a loss with a weight of its own, whose gradients are computed at the end of the micro-batch.

        Args:
            loss: the mean over its tokens or samples.
            weight: how many these are.
            backward: computes the gradients of a loss; further arguments are options of `Tensor.backward`.
            optimizers: those that use the gradients.

        Raises:
            Conflict: the whole micro-batch has a weight.
        """
        if self.factor is not None:
            raise Conflict(
                "Cannot compute gradients with backward(loss, weight=...).",
                "The micro-batch has a weight for all its losses: accumulate(model, weight=...).",
                "Give each loss its weight in backward, and none in accumulate.",
            )
        if self.loss_weights is None:
            from accel_torch.loss_weights import LossWeights

            self.check_weight()
            self.loss_weights = LossWeights(self, current.process(), optimizers)
            self.hooks.enter(self.loss_weights)
            self._simplify()
        self.loss_weights.add(loss, self.weight_of(weight)[0], backward)

    def _forget_loss_weights(self) -> None:
        """Note that a loss has no weight of its own."""
        unfinished = self.weighting is not None and self.weighting.unfinished
        assert self.loss_weights is not None
        self.refuse_mixing(unfinished or self.loss_weights.pending)
        self.hooks.leave(self.loss_weights)
        self.loss_weights = None
        self._simplify()

    def set_weight(
        self,
        weight: float | Tensor,
        loss_reduction: LossReduction,
        last: bool | None = None,
        total: float | None = None,
    ) -> None:
        """Give the current micro-batch a weight.

        Args:
            weight: the number of tokens or samples.
            loss_reduction: whether the loss is the mean or the sum over them.
            last: whether it is the last micro-batch of its window; None for the position of the current one.
            total: the weights of all processes, if they are known.

        Raises:
            NotOffered: the strategy accumulates gradients itself.
            SettingError: `loss_reduction` is neither "mean" nor "sum".
        """
        self.check_weight()
        if loss_reduction not in ("mean", "sum"):
            raise SettingError(
                f"Cannot accumulate with loss_reduction={loss_reduction!r}.",
                "The loss of a micro-batch must be the mean or the sum over its tokens.",
                "Give 'mean' or 'sum'.",
            )
        if self.weighting is None:
            from accel_torch.weighting import TokenWeighting

            self.refuse_mixing(not self.first)
            self.weighting = TokenWeighting(current.process())
            self.hooks.enter(self.weighting)
            self._simplify()
        is_last = self.gradient.sync_gradients if last is None else last
        self.factor = self.weighting.enter(weight, loss_reduction, is_last, total)

    def check_weight(self) -> None:
        """Check that this strategy can weight micro-batches.

        Raises:
            NotOffered: the strategy accumulates gradients itself.
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

    def clear_weight(self) -> None:
        """Note that the current micro-batch has no weight.

        Raises:
            Conflict: other micro-batches of its window have a weight.
        """
        if self.weighting is not None:
            self.refuse_mixing(self.weighting.unfinished)
            self.hooks.leave(self.weighting)
            self.weighting = None
            self._simplify()

    @staticmethod
    def refuse_mixing(mixed: bool) -> None:
        """Raise an error if some micro-batches of a window have weights and others have none.

        Raises:
            Conflict: `mixed` is true.
        """
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
            begin_micro_batch(self.models)
        if self.weight is not None:
            accumulation.set_weight(*accumulation.weight_of(self.weight, self.loss_reduction))
        elif accumulation.weighting is not None and accumulation.loss_weights is None and not accumulation.exact:
            accumulation.clear_weight()
        accumulation.in_block, accumulation.models = True, self.models
        if not gradient.sync_gradients and accumulation.can_hold_back and not gradient.plugin.sync_each_batch:
            self._held = no_sync_all(accumulation.strategy, self.models)
            self._held.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        accumulation = self.accumulation
        try:
            if kind is None and accumulation.loss_weights is not None:
                accumulation.loss_weights.compute()
        finally:
            accumulation.factor, accumulation.in_block, accumulation.first = None, False, True
            accumulation.models = ()
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
