"""The losses and the batches since the last step: what a step is judged by, and what its samples are."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_torch.samples_at_hand import drawn_batches

if TYPE_CHECKING:
    from torch import Tensor

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


class Window:
    """The losses of a window of micro-batches, weighted as their gradients are.

    It ends when an optimizer has stepped, and the next one begins with the next backward pass. So two optimizers that
    step after one backward pass see the same losses, and two with a backward pass each see their own.

    Args:
        accumulation: the position in the window, with the weights of the micro-batches.

    Attributes:
        number: number of the window.
        has_ended: whether the next backward pass begins another one.
        losses: the loss of each micro-batch of this process, on its device.
        total: the weighted sum of the losses; None if there were none.
        share: the sum of the weights.
        batches: the batches of the window.
    """

    def __init__(self, accumulation: Accumulation) -> None:
        self._accumulation = accumulation
        self.number, self.has_ended = 0, True
        self._begin()

    def _begin(self) -> None:
        self.number += 1
        self.has_ended = False
        self.losses: list[Tensor] = []
        self.total: Tensor | None = None
        self.share = 0.0
        self.batches: list[ReadBatch] = []

    def end(self) -> None:
        """Note that an optimizer has stepped, or was judged."""
        self.has_ended = True

    def add(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch, after its backward pass; a stand-in of an exact epoch counts nothing."""
        if self.has_ended:
            self._begin()
        accumulation = self._accumulation
        loader: Any = accumulation.gradient.active_dataloader
        progress = getattr(loader, "progress", None)
        if progress is not None:
            self.batches.append(ReadBatch(weakref.ref(loader), progress.iteration, progress.received - 1))
        if accumulation.exact and getattr(loader, "is_stand_in", False):
            return
        loss = loss.detach()
        if loss.dim():
            loss = loss.mean()
        if hasattr(loss, "full_tensor"):
            loss = loss.full_tensor()
        factor, share = accumulation.factor, 1.0
        if factor is not None and accumulation.weighting is not None:
            share = accumulation.weighting.share
        elif accumulation.exact and hasattr(loader, "step_weights"):
            factor = share = loader.step_weights[0]
        self.losses.append(loss)
        part = loss if factor is None else loss * factor
        self.total = part if self.total is None else self.total + part
        self.share += share

    def positions(self) -> str:
        """Where the batches are in their loaders, as text such as "epoch 0, batches 4 to 7"."""
        return "; ".join(self._positions())

    def _positions(self) -> Iterator[str]:
        ranges: dict[int, list[int]] = {}
        for batch in self.batches:
            first = batch.iteration.steps - batch.iteration.received
            ranges.setdefault(batch.iteration.epoch, []).append(first + batch.number)
        for epoch, numbers in ranges.items():
            last = f"batches {min(numbers)} to {max(numbers)}" if len(set(numbers)) > 1 else f"batch {numbers[0]}"
            yield f"epoch {epoch}, {last}"
