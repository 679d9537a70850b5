"""What happens between two batches of a prepared loader: torn checkpoints are taken again, and a run may end."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_plugins.checkpoint.boundaries import StepBoundaries
    from accel_torch.parts import Parts

__all__ = ("Pause", "pause")


class Pause:
    """Called by a prepared loader before each of its batches; see `PreparedLoader.between_batches`.

    A boundary between steps is a pause of a loader whose last batch was trained on: an optimizer stepped since the
    loader gave it out. A loader for evaluation has none, even one that is read inside the loop of another, so that
    parameters which are exchanged for an evaluation are never taken for those of the run.

    Args:
        parts: the Accelerator.
        ending: ends the run here if it was asked to end.
    """

    __slots__ = ("_ending", "_parts", "_seen", "_steps")

    def __init__(self, parts: Parts, ending: Callable[[], None] | None) -> None:
        # The Accelerator keeps the loader, which keeps this.
        self._parts, self._ending = weakref.ref(parts), ending
        self._seen: StepBoundaries | None = None
        self._steps = 0

    def __call__(self, first: bool) -> None:
        parts = self._parts()
        saver = None if parts is None else parts._saver
        if parts is not None and saver is not None:
            seen = saver.boundaries
            trained = not first and seen is not None and seen is self._seen and seen.steps > self._steps
            if trained and parts.gradient_state.sync_gradients:
                saver.between_steps()
                seen = saver.boundaries
            self._seen, self._steps = seen, 0 if seen is None else seen.steps
        if self._ending is not None and not first:
            self._ending()


def pause(parts: Parts, loader: Any) -> None:
    """Let a prepared loader call between its batches."""
    ending = None
    if parts._options.project.save_on_signal:
        from accel_torch.preemption import ending_of

        ending = ending_of(parts)
    loader.between_batches = Pause(parts, ending)
