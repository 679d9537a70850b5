"""Gradients of a process in flat buckets, as they travel between replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ("GradientBuckets", "local_shard")


def local_shard(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds; all of one that is not spread over processes."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class GradientBuckets:
    """Gradients in flat buckets of about one size, each of one dtype on one device.

    Which parameters had a gradient travels with the first bucket: one that has none on this process counts as zero if
    it has one on another, and still has none if nobody has.

    Args:
        parameters: what trains, in the same order on all processes.
        bucket_bytes: size of a bucket.

    Attributes:
        flat: the buckets.
    """

    def __init__(self, parameters: Iterable[Tensor], bucket_bytes: int) -> None:
        self._parameters = list(parameters)
        self.flat: list[Tensor] = []
        self._held: list[list[Tensor]] = []
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in self._parameters:
            part = local_shard(parameter)
            alike.setdefault((part.dtype, part.device), []).append(parameter)
        flags = torch.tensor([float(parameter.grad is not None) for parameter in self._parameters])
        for (dtype, device), group in alike.items():
            for bucket in _cut(group, bucket_bytes):
                leading = [] if self.flat else [flags.to(device, dtype)]
                self._add(bucket, leading)

    def _add(self, parameters: Sequence[Tensor], leading: list[Tensor]) -> None:
        parts = [_gradient(parameter) for parameter in parameters]
        self.flat.append(torch.cat([*leading, *(part.reshape(-1) for part in parts)]))
        self._held.append(list(parameters))

    def write_back(self) -> None:
        """Give the parameters what the buckets hold now: whole gradients as views of them, without a copy."""
        if not self.flat:
            return
        count = len(self._parameters)
        somewhere = dict(zip(map(id, self._parameters), (self.flat[0][:count] > 0).tolist(), strict=True))
        for number, (flat, parameters) in enumerate(zip(self.flat, self._held, strict=True)):
            sizes = [local_shard(parameter).numel() for parameter in parameters]
            values = (flat[count:] if number == 0 else flat).split(sizes)  # type: ignore[no-untyped-call]
            for parameter, value in zip(parameters, values, strict=True):
                if somewhere[id(parameter)]:
                    _give(parameter, value)


def _give(parameter: Tensor, value: Tensor) -> None:
    """Make a flat tensor the gradient of a parameter."""
    if not isinstance(parameter, DTensor):
        parameter.grad = value.view_as(parameter)
        return
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = local_shard(parameter.grad)
    gradient.copy_(value.view_as(gradient))


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(local_shard(parameter))
    return local_shard(parameter.grad).detach()


def _cut(parameters: Sequence[Tensor], bucket_bytes: int) -> Iterable[list[Tensor]]:
    """The parameters in their order, in groups whose gradients fill a bucket."""
    bucket: list[Tensor] = []
    filled = 0
    for parameter in parameters:
        part = local_shard(parameter)
        size = part.numel() * part.element_size()
        if bucket and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(parameter)
        filled += size
    if bucket:
        yield bucket
