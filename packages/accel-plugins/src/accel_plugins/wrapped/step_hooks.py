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
        judge_step: called with it when the gradients are complete, or with a closure after its first call. A step that
            one of them answers with False is left out.
        after_step: called with it and the result of the step, unless the step raised an error. The result is False if
            the step was skipped; reading it may wait for the device.
    """

    before_gradients_complete: tuple[Callable[[], None], ...] = ()
    before_step: tuple[Callable[[Optimizer], None], ...] = ()
    judge_step: tuple[Callable[[Optimizer], bool], ...] = ()
    after_step: tuple[Callable[[Optimizer, Any], None], ...] = ()
