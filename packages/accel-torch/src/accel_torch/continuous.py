"""Saving again and again while training goes on, as `ProjectConfiguration(save_policy=...)` says."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from accel_plugins.checkpoint.boundaries import ContinuousSaver, SavePace
from accel_torch.saving import save_state

if TYPE_CHECKING:
    from accel_torch.parts import Parts

__all__ = ("continuous_saving",)


def continuous_saving(parts: Parts) -> Callable[[], None]:
    """What saves a checkpoint when it is called between two steps and it is time."""
    project = parts._options.project
    policy = project.save_policy
    assert policy is not None
    if parts._continuous is None:
        # The Accelerator keeps the saver; a thread of the saver must not keep the Accelerator.
        owner = weakref.ref(parts)
        strategy = parts._engine.strategy
        behind = strategy.traits.supports_async_save or not strategy.traits.collective_save

        def save() -> None:
            if (accelerator := owner()) is not None:
                save_state(accelerator, None, True, async_save=behind)

        def busy() -> bool:
            accelerator = owner()
            return accelerator is not None and accelerator._saver is not None and accelerator._saver.busy

        pace = SavePace(policy.max_overhead)
        parts._continuous = ContinuousSaver(parts.state._process, save, busy, pace, project.deadline)
    return parts._continuous.between_steps
