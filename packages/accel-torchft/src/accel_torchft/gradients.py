"""Gradients of a process in flat buckets, which are reduced over replicas while backward computes further gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

__all__ = ("GradientBuckets", "local_shard")


def local_shard(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor; the whole tensor if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Bucket:
    """Gradients of some parameters of one dtype on one device.

    The bucket starts with one flag per parameter: whether it has a gradient. A gradient that is missing on this process
    counts as zero if another process has it, and remains None if no process has it.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self.sizes = [local_shard(parameter).numel() for parameter in parameters]
        self.forget()

    def forget(self) -> None:
        """Reset for the gradients of the next step."""
        self.missing = sum(parameter.requires_grad for parameter in self.parameters)
        """How many of its gradients backward has not computed yet."""
        self.flat: Tensor | None = None
        self.sent: Work | None = None

    def pack(self) -> Tensor:
        """Copy the flags and the gradients into one flat tensor."""
        part = local_shard(self.parameters[0])
        held = [float(parameter.grad is not None) for parameter in self.parameters]
        flags = torch.tensor(held, dtype=part.dtype, device=part.device)
        self.flat = torch.cat([flags, *(_gradient(parameter).reshape(-1) for parameter in self.parameters)])
        return self.flat

    def unpack(self) -> None:
        """Assign the reduced gradients to the parameters; unsharded gradients are views of the bucket."""
        assert self.flat is not None
        count = len(self.parameters)
        somewhere = (self.flat[:count] > 0).tolist()
        values = self.flat[count:].split(self.sizes)  # type: ignore[no-untyped-call]
        for parameter, held, value in zip(self.parameters, somewhere, values, strict=True):
            if held:
                _give(parameter, value)


class GradientBuckets:
    """Gradients in flat buckets of similar size, each of one dtype on one device.

    A bucket is sent as soon as backward has computed its last gradient; that of the last layers is the first. All
    processes send their buckets in the same order.

    Args:
        parameters: the trained parameters, in the same order on all processes.
        bucket_bytes: size of a bucket in bytes.
        send: begins to replace a flat tensor by its mean over the replicas.
        leaves: returns whether buckets may be sent during this backward, which is that of the step's last batch.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        bucket_bytes: int,
        send: Callable[[Tensor], Work],
        leaves: Callable[[], bool],
    ) -> None:
        self.parameters = list(parameters)
        self._send, self._leaves = send, leaves
        self._buckets = [_Bucket(group) for group in _cut(self.parameters, bucket_bytes)]
        self._of = {id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._complete: set[int] = set()
        self._left = 0
        """Number of buckets that were sent; buckets are sent in order."""
        self._changed = False
        """Whether a gradient changed after its bucket was sent."""
        # FSDP assigns gradients without calling these hooks.
        whole = [parameter for parameter in self.parameters if not isinstance(parameter, DTensor)]
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for parameter in whole
            if parameter.requires_grad
        ]

    def __len__(self) -> int:
        return len(self._buckets)

    def _note(self, parameter: Tensor) -> None:
        """Hook that runs after backward has computed a gradient."""
        if not self._leaves():
            return
        bucket = self._of[id(parameter)]
        if id(parameter) in self._complete:
            self._changed = self._changed or bucket.sent is not None
            return
        self._complete.add(id(parameter))
        bucket.missing -= 1
        while self._left < len(self._buckets) and not self._buckets[self._left].missing:
            self._let_leave()

    def _let_leave(self) -> None:
        bucket = self._buckets[self._left]
        bucket.sent = self._send(bucket.pack())
        self._left += 1

    def average(self) -> None:
        """Replace all gradients by their means over the replicas."""
        self._exchange()
        if self._changed:
            # The same gradients changed on every process, so every process sends them again.
            self._left = 0
            self._exchange()
        for bucket in self._buckets:
            bucket.unpack()
        self.forget()

    def _exchange(self) -> None:
        while self._left < len(self._buckets):
            self._let_leave()
        for bucket in self._buckets:
            assert bucket.sent is not None
            bucket.sent.wait()

    def forget(self) -> None:
        """Reset for the gradients of the next step."""
        self._complete.clear()
        self._left, self._changed = 0, False
        for bucket in self._buckets:
            bucket.forget()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _give(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter's gradient from a flat tensor."""
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


def _cut(parameters: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Split the parameters, from last to first, into one group per bucket."""
    open_: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in reversed(parameters):
        part = local_shard(parameter)
        kind, size = (part.dtype, part.device), part.numel() * part.element_size()
        if kind in open_ and filled[kind] + size > bucket_bytes:
            yield open_.pop(kind)
        open_.setdefault(kind, []).append(parameter)
        filled[kind] = (filled[kind] if len(open_[kind]) > 1 else 0) + size
    yield from open_.values()
