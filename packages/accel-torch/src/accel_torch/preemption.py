"""Saving a checkpoint when the run is asked to end, before it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from accel_plugins.checkpoint.boundaries import Preemption
from accel_state.errors import NotOffered
from accel_torch.saving import save_state, wait

if TYPE_CHECKING:
    from accel_torch.parts import Parts

__all__ = ("ending_of",)


def ending_of(parts: Parts) -> Callable[[], None]:
    """What ends the run when it is called between two batches, after a signal has asked for it.

    Raises:
        NotOffered: the Accelerator is used in another thread than the main one, which alone hears signals.
    """
    if parts._preemption is None:
        if threading.current_thread() is not threading.main_thread():
            raise NotOffered(
                "Cannot handle signals for ProjectConfiguration(save_on_signal=True).",
                "Only the main thread receives signals, and this is another thread.",
                "Prepare loaders in the main thread.",
            )

        def save() -> None:
            save_state(parts, None, True)
            wait(parts)

        parts._preemption = Preemption(parts.state._process, save, parts._options.project.deadline)
    return _boundary(parts, parts._preemption)


def _boundary(parts: Parts, preemption: Preemption) -> Callable[[], None]:
    """What is called between two batches; where partial gradients cannot be saved, windows have to end first."""
    gradient = parts.gradient_state
    if parts._engine.strategy.traits.can_checkpoint_partial_grads:
        return preemption.between_batches

    def between_windows() -> None:
        if gradient.sync_gradients:
            preemption.between_batches()

    return between_windows
