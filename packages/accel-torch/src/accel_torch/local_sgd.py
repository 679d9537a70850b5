"""Local SGD: every process trains independently for some steps, then all average their parameters.

Stich, "Local SGD Converges Fast and Communicates Little" (ICLR 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING

from accel_plugins.layers import strategy_model
from accel_state.errors import SettingError
from accel_state.settings.integers import as_int
from accel_torch.hooks import Hook

if TYPE_CHECKING:
    from torch.nn import Module

    from accel_torch.accelerator import Accelerator

__all__ = ("LocalSGD",)


class LocalSGD:
    """Context manager without gradient synchronisation, which averages parameters every few steps and at its end.

    Args:
        accelerator: the Accelerator that prepared the model.
        model: a prepared model.
        local_sgd_steps: optimizer steps between two averages.
        enabled: False synchronises gradients as usual; on a single process the block has no effect.

    Raises:
        SettingError: `local_sgd_steps` is not an int of at least 1.
        NotOffered: the backend shards the parameters; or, when the block is entered, a `StepGuard` watches a run in
            fp16.

    Example:
        >>> with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
        ...     for inputs, targets in loader:
        ...         with accelerator.accumulate(model):
        ...             accelerator.backward(loss_function(model(inputs), targets))
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        ...             local_sgd.step()
    """

    def __init__(self, accelerator: Accelerator, model: Module, local_sgd_steps: int, enabled: bool = True) -> None:
        steps = as_int(local_sgd_steps)
        if steps is None or steps < 1:
            raise SettingError(
                f"Cannot use LocalSGD with local_sgd_steps={local_sgd_steps!r}.",
                "The number of optimizer steps between two averages must be an int of at least 1.",
                "Give for example local_sgd_steps=8.",
            )
        self.enabled = enabled and accelerator.use_distributed
        if self.enabled:
            accelerator.session.backend.demand("average_parameters")
        self.num_steps = 0
        self.accelerator, self.model, self.local_sgd_steps = accelerator, model, steps
        self.model_sync_obj: AbstractContextManager[object] | None = None
        self._count = _KeptCount(self)

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            hooks = self.accelerator.session.hooks
            for replicas_separate in hooks.replicas_separate:
                replicas_separate()
            hooks.enter(self._count)
            self.model_sync_obj = self.accelerator.no_sync(self.model)
            self.model_sync_obj.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.model_sync_obj is None:
            return
        self.model_sync_obj.__exit__(kind, error, trace)
        self.model_sync_obj = None
        self.accelerator.session.hooks.leave(self._count)
        # After an error the other processes may never reach the collective.
        if kind is None:
            self._average()

    def step(self) -> None:
        """Count a micro-batch, and average after every `local_sgd_steps` optimizer steps; call it on every process."""
        if not self.enabled or not self.accelerator.sync_gradients:
            return
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        self.accelerator.session.strategy.average_parameters(strategy_model(self.model))


class _KeptCount(Hook):
    """Takes the number of steps back when the run returns to a snapshot, so that averages come at the same steps."""

    def __init__(self, local_sgd: LocalSGD) -> None:
        self._local_sgd = local_sgd

    def keep_state(self) -> Callable[[], None]:
        """Keep the number of steps."""
        steps = self._local_sgd.num_steps

        def put_back() -> None:
            self._local_sgd.num_steps = steps

        return put_back
