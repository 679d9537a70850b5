"""Gradient accumulation weighted by tokens, equivalent to one large batch.

Micro-batch i of a process has the weight w_i and the mean loss L_i. The required gradient is that of sum(w_i L_i) /
sum(w_i) over all micro-batches of all processes. The sum of the weights is known only at the last micro-batch. So
losses are multiplied by their weights, and complete gradients are divided by the sum. Processes exchange their sums
once a step, while the last micro-batch computes.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Final, Literal

import torch

from accel_state.errors import SettingError
from accel_state.protocol.call import PendingCall, start_all_gather_bytes
from accel_torch.hooks import Hook

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from accel_state.current import Process

__all__ = ("LossReduction", "TokenWeighting", "power_of_two_near")

LossReduction = Literal["mean", "sum"]

_WEIGHTS: Final = struct.Struct("<dq")
"""The sum of a process's weights, and its number of micro-batches."""


class TokenWeighting(Hook):
    """The weights of the current window of micro-batches; as a hook, it completes gradients before a step.

    Args:
        process: this process and its transport.

    Attributes:
        unfinished: whether the last micro-batch of the window is still to come.
        share: the weight of the current micro-batch, in the unit by which its loss is divided.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._sum = 0.0
        self._count = 0
        self._everyones: list[tuple[float, int]] = []
        self._travelling: PendingCall | None = None
        # The sum of the window over all processes, as far as it is known without an exchange.
        self._total_of_all: float | None = 0.0
        self._settled = True
        self._factor = 1.0
        self._completed: set[int] = set()
        # Weights may be a thousand tokens and more. Dividing losses by a power of two of about this size avoids
        # overflow in fp16 and does not round. All processes must divide by the same number.
        self._unit = 0.0
        self.share = 0.0
        self.unfinished = False

    def enter(
        self, weight: float | Tensor, loss_reduction: LossReduction, last: bool, total: float | None = None
    ) -> float:
        """Enter a micro-batch, and return the factor of its loss.

        Args:
            weight: the number of tokens of the micro-batch.
            loss_reduction: whether its loss is the mean or the sum over its tokens.
            last: whether it is the last one of the window.
            total: the weights of all processes in this micro-batch, if they are known; then none are exchanged.
        """
        if not self.unfinished:
            self._sum, self._count, self._total_of_all = 0.0, 0, 0.0
            self._completed.clear()
        self._total_of_all = None if total is None or self._total_of_all is None else self._total_of_all + total
        number = float(weight)
        self._sum += number if number >= 0 else math.nan
        self._count += 1
        self.unfinished = not last
        if not self._unit:
            self._exchange(wait=True)
            self._unit = power_of_two_near(*self._totals())
        if last:
            self._exchange(wait=False)
            self._settled = False
        self.share = number / self._unit
        return 1.0 / self._unit if loss_reduction == "sum" else self.share

    def _exchange(self, wait: bool) -> None:
        """Begin to exchange the sums, unless they are known."""
        if self._total_of_all is not None:
            self._everyones = [(self._total_of_all, self._count * self._process.world_size)]
            return
        mine = _WEIGHTS.pack(self._sum, self._count)
        self._travelling = start_all_gather_bytes(self._process.transport, "accumulate", mine)
        if wait:
            self._receive()

    def _receive(self) -> None:
        if self._travelling is not None:
            self._everyones = [_WEIGHTS.unpack(row) for row in self._travelling.wait()]
            self._travelling = None

    def _totals(self) -> tuple[float, float]:
        """(sum of weights, number of micro-batches) over all processes, as last received."""
        return sum(weight for weight, _ in self._everyones), sum(count for _, count in self._everyones)

    def before_step(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's complete gradients by the sum of all weights, once a window.

        Raises:
            SettingError: a weight of any process is negative or not finite.
        """
        if id(optimizer) in self._completed or self.unfinished:
            return
        if not self._settled:
            self._receive()
            self._settle()
            self._settled = True
        self._completed.add(id(optimizer))
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        # Sharded and full gradients have different tensor types, which cannot be multiplied in one call.
        for kind in {type(gradient) for gradient in gradients}:
            alike = [gradient for gradient in gradients if type(gradient) is kind]
            torch._foreach_mul_(alike, self._factor)  # pyright: ignore[reportPrivateImportUsage]

    def _settle(self) -> None:
        total, count = self._totals()
        if not math.isfinite(total):
            wrong = [str(rank) for rank, (sent, _) in enumerate(self._everyones) if not math.isfinite(sent)]
            raise SettingError(
                "Cannot weight micro-batches with accumulate(model, weight=...).",
                f"A weight is negative or not finite on process {', '.join(wrong)}.",
                "Give the number of tokens (or samples) in the loss of the micro-batch.",
            )
        # Backward has averaged over the processes. Without tokens the gradient is zero.
        self._factor = self._process.world_size * self._unit / total if total else 0.0
        self._unit = power_of_two_near(total, count)


def power_of_two_near(total: float, count: float) -> float:
    """The power of two nearest to the mean weight of a micro-batch; 1 without weights."""
    return 2.0 ** round(math.log2(total / count)) if 0 < total < math.inf else 1.0
