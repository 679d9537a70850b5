"""PowerSGD on whole buckets: a bucket of gradients, seen as one square matrix, travels as two narrow ones.

The method is Vogels, Karimireddy, Jaggi: "PowerSGD" (NeurIPS 2019), algorithms 1 and 2, with the bucket in place of a
layer. torch has such a hook as well; its own assertion about three-dimensional matrices stops it at the first step that
compresses.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

__all__ = ("batched_power_sgd",)


def batched_power_sgd(state: PowerSGDState, bucket):  # type: ignore[no-untyped-def] # torch compares annotations with objects
    """Communication hook: the mean of a bucket over the processes, at rank `state.matrix_approximation_rank`.

    Until step `state.start_powerSGD_iter` buckets travel whole. With error feedback, what compression lost is added to
    the next step's bucket.
    """
    group: Any = state.process_group if state.process_group is not None else dist.group.WORLD
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]
        return allreduce_hook(group, bucket)
    flat: torch.Tensor = bucket.buffer()
    index: int = bucket.index()
    square = _squared(flat)
    if state.use_error_feedback and index in state.error_dict:
        square += state.error_dict[index]
    guess = torch.linalg.qr(_guess(state, index, square)).Q
    sent = dist.all_reduce(square @ guess, group=group, async_op=True).get_future()

    def finish(future: Any) -> torch.Tensor:
        left = torch.linalg.qr(future.value()[0]).Q
        right = square.t() @ left
        dist.all_reduce(right, group=group)
        right /= dist.get_world_size(group)
        mean = left @ right.t()
        if state.use_error_feedback:
            state.error_dict[index] = square - mean
        if state.warm_start:
            state.q_memory_dict[index] = right
        state.maybe_increase_iter(bucket)  # type: ignore[no-untyped-call]
        flat.copy_(mean.view(-1)[: flat.numel()])
        return flat

    return sent.then(finish)


def _squared(flat: torch.Tensor) -> torch.Tensor:
    """A copy of a vector as the smallest square matrix that holds it, filled up with zeros."""
    side = math.isqrt(flat.numel() - 1) + 1
    square = flat.new_zeros(side * side)
    square[: flat.numel()] = flat
    return square.view(side, side)


def _guess(state: PowerSGDState, index: int, square: torch.Tensor) -> torch.Tensor:
    """Where to look for the largest directions: where the last step found them, or the same random place everywhere."""
    if index in state.q_memory_dict:
        found: torch.Tensor = state.q_memory_dict[index]
        return found
    generator = torch.Generator().manual_seed(state.rng.randint(1_000_000_000))
    columns = min(state.matrix_approximation_rank, square.shape[0])
    return torch.randn(square.shape[0], columns, generator=generator).to(square)
