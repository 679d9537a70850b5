"""What prepared optimizers call before and after their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ("StepHooks",)


class StepHooks:
    """The functions that prepared optimizers call around each step; the optimizers of a session share one object.

    Attributes:
        before_gradients_complete: called before the strategy completes the gradients, if there is a `before_step` too.
        before_step: called with the user's optimizer before each step.
        after_step: called with it and the result of the step, unless the step raised an error. The result is False if
            the step was skipped; reading it may wait for the device.
    """

    before_gradients_complete: tuple[Callable[[], None], ...] = ()
    before_step: tuple[Callable[[Optimizer], None], ...] = ()
    after_step: tuple[Callable[[Optimizer, Any], None], ...] = ()
