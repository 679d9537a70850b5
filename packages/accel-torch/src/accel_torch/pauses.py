"""What happens between two batches of a prepared loader: a run may save, take a torn checkpoint again, or end."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accel_state.hang_report.rank_status import PROGRESS

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
        saving: saves here if it is time.
    """

    __slots__ = ("_all_steps", "_ending", "_parts", "_saving", "_seen", "_steps")

    def __init__(
        self, parts: Parts, ending: Callable[[], None] | None, saving: Callable[[], None] | None = None
    ) -> None:
        # The Accelerator keeps the loader, which keeps this.
        self._parts, self._ending, self._saving = weakref.ref(parts), ending, saving
        self._seen: StepBoundaries | None = None
        self._steps = self._all_steps = 0

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
        if self._saving is not None and parts is not None:
            if not first and PROGRESS.steps > self._all_steps and parts.gradient_state.sync_gradients:
                self._saving()
            self._all_steps = PROGRESS.steps
        if self._ending is not None and not first:
            self._ending()


def pause(parts: Parts, loader: Any) -> None:
    """Let a prepared loader call between its batches."""
    ending = None
    if parts._options.project.save_on_signal:
        from accel_torch.preemption import ending_of

        ending = ending_of(parts)
    saving = None
    if parts._options.project.save_policy is not None:
        from accel_torch.continuous import continuous_saving

        saving = continuous_saving(parts)
    loader.between_batches = Pause(parts, ending, saving)
