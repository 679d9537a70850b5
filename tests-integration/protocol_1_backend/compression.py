"""Sending the largest entries of gradients, and remembering the others.

Error feedback after Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory" (NeurIPS 2018): what a process does not
send now is added to what it wants to send next time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

__all__ = ("Compressor",)


class Compressor:
    """The communication hook of one `DistributedDataParallel`.

    Args:
        keep: share of the entries of each gradient that is sent.
        feedback: whether what was not sent is kept.
        scale: factor on the gradients at present; the scaler of fp16 changes it from step to step.

    Attributes:
        unsent: by parameter, what this process has not sent yet, at its true size.
        sent_bytes: how much this process has sent so far.
    """

    def __init__(self, keep: float, feedback: bool, scale: Callable[[], float]) -> None:
        self.keep, self.feedback, self._scale = keep, feedback, scale
        self.unsent: dict[Parameter, Tensor] = {}
        self.sent_bytes = 0

    def exchange(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start to exchange the gradients of a `GradBucket`; the future holds their mean over the processes."""
        flat: Tensor = bucket.buffer()
        scale = self._scale()
        gradients, parameters = bucket.gradients(), bucket.parameters()
        messages = [
            self._message(parameter, gradient, scale) for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        mine = torch.cat(messages)
        self.sent_bytes += mine.numel()
        everyones = mine.new_empty(dist.get_world_size() * mine.numel())
        work: Any = dist.all_gather_into_tensor(everyones, mine, async_op=True)

        def combine(_: object) -> Tensor:
            _add_up(everyones.view(dist.get_world_size(), -1), [len(one) for one in messages], gradients)
            return flat.div_(dist.get_world_size())

        future: torch.futures.Future[Tensor] = work.get_future().then(combine)
        return future

    def _message(self, parameter: Parameter, gradient: Tensor, scale: float) -> Tensor:
        """The largest entries of a gradient and where they stand, as bytes; the rest is kept."""
        wanted = gradient.flatten().clone()
        if self.feedback and parameter in self.unsent:
            wanted += self.unsent[parameter] * scale
        count = math.ceil(self.keep * wanted.numel())
        places = torch.topk(wanted.abs(), count, sorted=False).indices
        values = wanted[places]
        if self.feedback and count < wanted.numel():
            self._keep_rest(parameter, wanted, places, scale)
        return torch.cat([values.view(torch.uint8), places.to(torch.int32).view(torch.uint8)])

    def _keep_rest(self, parameter: Parameter, wanted: Tensor, places: Tensor, scale: float) -> None:
        # The step is skipped when anything overflowed, and what was kept before is still to be sent then.
        if torch.isfinite(wanted).all():
            wanted[places] = 0
            self.unsent[parameter] = wanted.div_(scale)


def _add_up(everyones: Tensor, sizes: Sequence[int], gradients: Sequence[Tensor]) -> None:
    """Overwrite gradients with the sum of what all processes sent; `everyones` has a row of bytes for each."""
    for columns, gradient in zip(torch.split(everyones, list(sizes), dim=1), gradients, strict=True):
        width = gradient.element_size()
        count = columns.shape[1] // (width + 4)
        flat = gradient.view(-1).zero_()
        for row in columns:
            values = row[: count * width].clone().view(gradient.dtype)
            flat.index_add_(0, row[count * width :].clone().view(torch.int32), values)
