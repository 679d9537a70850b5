"""Steps that an engine makes within backward: they are judged before each update, and a bad one raises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from accel_torch.hooks import Hook

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from accel_torch.session import Session
    from accel_torch.step_guard.window import Window

__all__ = ("EngineSteps",)


class _Judge(Protocol):
    """What is used of a `StepJudge`, which is above this module."""

    window: Window

    def judge_engine(self, sums: Tensor, norm: Tensor) -> None:
        """Judge a step by its numbers."""


class EngineSteps(Hook):
    """Lets a judge see the steps of an engine, such as DeepSpeed's.

    Args:
        session: the session, whose strategy calls `on_gradients` before each update.
        judge: the judge.
    """

    def __init__(self, session: Session, judge: _Judge) -> None:
        self._strategy, self._judge = session.strategy, judge
        session.strategy.on_gradients = self.before_update

    def before_backward(self, loss: Tensor) -> None:
        """Note the loss: the engine steps before its backward pass ends."""
        self._judge.window.add(loss)

    def before_update(self, model: Module) -> None:
        """Judge the gradients that the engine is about to use.

        Raises:
            NonFiniteStep, SpikeStep: the step is bad.
        """
        window, process = self._judge.window, self._strategy.context.process
        # In fp16 the engine's gradients are scaled, and it skips steps in which they overflow.
        scales = self._strategy.context.precision.dtype is torch.float16
        gradients = [] if scales else list(self._strategy.gradients(model).values())
        norm = torch.nn.utils.get_total_norm(gradients)
        sums = torch.zeros(3, device=process.device)
        if window.total is not None:
            sums[0] = window.total
            sums[1] = window.share
        sums[2] = norm
        if process.world_size > 1:
            process.transport.all_reduce(sums).wait()
        self._judge.judge_engine(sums, norm)
