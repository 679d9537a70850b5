"""The losses and the batches since the last step: what a step is judged by, and what its samples are."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from accel_torch.hooks import Hook
from accel_torch.samples_at_hand import drawn_batches

if TYPE_CHECKING:
    from accel_torch.accumulation import Accumulation

__all__ = ("ReadBatch", "Window")


class ReadBatch(NamedTuple):
    """A batch of a loader with a backward pass.

    Args:
        loader: the loader, weakly.
        iteration: the position of its iterator.
        number: number of the batch in this iterator, from 0.
    """

    loader: weakref.ref[Any]
    iteration: Any
    number: int

    @property
    def indices(self) -> list[Any]:
        """The indices that the loader drew for it; empty if they are not known."""
        drawn = drawn_batches(self.loader())
        return [] if drawn is None else list(drawn.batch(self.number))

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the number of the batch in it."""
        iteration = self.iteration
        return iteration.epoch, iteration.steps - iteration.received + self.number


class Window(Hook):
    """The losses of a window of micro-batches, weighted as their gradients are.

    It ends when an optimizer has stepped, and the next one begins with the next backward pass. So two optimizers that
    step after one backward pass see the same losses, and two with a backward pass each see their own.

    Numbers of the host are floats: reading them costs nothing, and they are faster than tensors.

    Args:
        accumulation: the position in the window, with the weights of the micro-batches.

    Attributes:
        backwards: backward passes of the run so far; what was measured before the last one is out of date.
        has_ended: whether the next backward pass begins another window.
        losses: the loss of each backward pass of this process.
        total: the weighted sum of the losses.
        share: the sum of the weights; 0 if there were no losses.
        batches: the batches of the window.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = accumulation
        self.backwards = 0
        self._begin()

    def _begin(self) -> None:
        self.has_ended = False
        self.losses: list[Tensor | float] = []
        self.total: Tensor | float = 0.0
        self.share = 0.0
        self.batches: list[ReadBatch] = []
        # By loss, in a window whose losses have weights of their own: what is still to be scaled.
        self._apart: dict[int, Tensor | float] = {}

    def after_backward(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch; a stand-in of an exact epoch counts nothing."""
        if self.has_ended:
            self._begin()
        self.backwards += 1
        accumulation = self._accumulation
        loaders = accumulation.gradient.loaders
        loader: Any = loaders[-1] if loaders else None
        if loader is not None:
            progress = getattr(loader, "progress", None)
            if progress is not None:
                self.batches.append(ReadBatch(weakref.ref(loader), progress.iteration, progress.received - 1))
            if accumulation.exact and getattr(loader, "is_stand_in", False):
                return
        value = _value(loss)
        self.losses.append(value)
        factor, share, weights = accumulation.factor, 1.0, accumulation.loss_weights
        if weights is not None and weights.apart is not None:
            self._apart[weights.apart] = self._apart.get(weights.apart, 0.0) + value
            return
        if factor is not None and accumulation.weighting is not None:
            share = accumulation.weighting.share
        elif accumulation.exact and hasattr(loader, "step_weights"):
            factor = share = loader.step_weights[0]
        self.total = self.total + (value if factor is None else value * factor)
        self.share += share
        if weights is not None:
            for number, part in self._apart.items():
                self.total = self.total + part * weights.scales[number]
            self._apart.clear()

    def positions(self) -> str:
        """Where the batches are in their loaders, as text such as "epoch 0, batches 4 to 7"."""
        epochs: dict[int, list[int]] = {}
        for epoch, number in (batch.position for batch in self.batches):
            epochs.setdefault(epoch, []).append(number)
        return "; ".join(
            f"epoch {epoch}, batches {min(numbers)} to {max(numbers)}"
            if len(set(numbers)) > 1
            else f"epoch {epoch}, batch {numbers[0]}"
            for epoch, numbers in epochs.items()
        )


def _value(loss: Tensor) -> Tensor | float:
    """The mean loss without its graph: a number if it is in host memory, else a tensor."""
    if type(loss) is not Tensor and hasattr(loss, "full_tensor"):
        loss = loss.full_tensor()
    if loss.dim():
        loss = loss.mean()
    return loss.item() if loss.is_cpu else loss.detach()
