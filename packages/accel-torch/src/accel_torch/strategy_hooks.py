"""What a strategy does around each optimizer step, as hooks of a session."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from accel_plugins.strategy import Strategy
from accel_torch.accumulation import share_of_step
from accel_torch.hooks import Hook

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from accel_plugins.prepared import PreparedObjects
    from accel_state.gradient import GradientState
    from accel_torch.session import Session

__all__ = ("enter_hooks_of_strategy",)


class StrategyAfterStep(Hook):
    """Calls the strategy's `after_step` with the model of the optimizer.

    Args:
        strategy: the strategy.
        prepared: the prepared objects; weakly referenced, because their optimizers have references to hooks.
    """

    def __init__(self, strategy: Strategy, prepared: PreparedObjects) -> None:
        self._strategy, self._prepared = strategy, weakref.ref(prepared)
        self._models: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Module]] = weakref.WeakKeyDictionary()

    def after_step(self, optimizer: Optimizer, stepped: Any) -> None:
        """Do what follows a step that was not skipped."""
        if stepped:
            self._strategy.after_step(self._model_of(optimizer), optimizer)

    def _model_of(self, optimizer: Optimizer) -> Module | None:
        """The model of the optimizer's parameters; found at the first use, since models may be prepared later."""
        known = self._models.get(optimizer)
        model = None if known is None else known()
        prepared = self._prepared()
        if model is None and prepared is not None and (model := prepared.owner_of(optimizer)) is not None:
            self._models[optimizer] = weakref.ref(model)
        return model


class StepsOfShares(Hook):
    """Notes each call of an optimizer's `step` for the loader, in runs whose world size may change."""

    def __init__(self, strategy: Strategy, gradient: GradientState) -> None:
        self._strategy, self._gradient = strategy, gradient

    def before_step(self, optimizer: Optimizer) -> None:
        """Mark the share of the newest batch as stepped."""
        share = share_of_step(self._strategy, self._gradient)
        if share is not None:
            share.stepped = True


def enter_hooks_of_strategy(session: Session) -> None:
    """Call what the strategy does around a step. What it does not override does nothing, and is not called."""
    strategy, hooks = session.strategy, session.hooks
    if type(strategy).finalize_gradients is not Strategy.finalize_gradients:
        hooks.before_step += (strategy.finalize_gradients,)
    if strategy.capabilities.elastic:
        hooks.enter(StepsOfShares(strategy, session.gradient))
    if type(strategy).after_step is not Strategy.after_step:
        hooks.enter(StrategyAfterStep(strategy, session.prepared))
