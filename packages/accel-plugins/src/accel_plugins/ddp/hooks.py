"""Communication hooks: compression of gradients for communication between processes.

Batched PowerSGD treats a bucket of gradients as one square matrix and sends two narrow matrices instead. The method is
Vogels, Karimireddy, Jaggi: "PowerSGD" (NeurIPS 2019), algorithms 1 and 2, applied to buckets instead of layers. torch
has such a hook too, but it fails at its first compressed step, by an assertion about three-dimensional matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from accel_state.errors import SettingError

__all__ = (
    "batched_power_sgd",
    "register",
)

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


def batched_power_sgd(state: PowerSGDState, bucket):  # type: ignore[no-untyped-def] # torch compares annotations with objects
    """Communication hook: average a bucket over the processes with rank `state.matrix_approximation_rank`.

    Before step `state.start_powerSGD_iter` buckets are not compressed. With error feedback, the compression error is
    added to the next step's bucket.
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
    """A copy of a vector in the smallest square matrix that has room for it, padded with zeros."""
    side = math.isqrt(flat.numel() - 1) + 1
    square = flat.new_zeros(side * side)
    square[: flat.numel()] = flat
    return square.view(side, side)


def _guess(state: PowerSGDState, index: int, square: torch.Tensor) -> torch.Tensor:
    """The start of the power iteration: the last step's result, or a random matrix, equal on all processes."""
    if index in state.q_memory_dict:
        projection: torch.Tensor = state.q_memory_dict[index]
        return projection
    generator = torch.Generator().manual_seed(state.rng.randint(1_000_000_000))
    columns = min(state.matrix_approximation_rank, square.shape[0])
    return torch.randn(square.shape[0], columns, generator=generator).to(square)


def _under_another_name(hook: Hook) -> Hook:
    """Rename a hook: without CUDA, torch rejects its bf16 hooks by their names, although gloo supports bf16."""

    def compress(state, bucket):  # type: ignore[no-untyped-def] # torch compares annotations with objects
        return hook(state, bucket)

    return compress


def _wrapped_in_bf16(hook: Hook) -> Hook:
    return _under_another_name(default_hooks.bf16_compress_wrapper(hook))


_HOOKS_BY_NAME: Final[dict[str, Hook]] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": _under_another_name(default_hooks.bf16_compress_hook),
    "power_sgd": powerSGD_hook.powerSGD_hook,
    "batched_power_sgd": batched_power_sgd,
}

_HOOKS_WITH_STATE: Final = frozenset({"power_sgd", "batched_power_sgd"})

_HOOK_WRAPPERS: Final[dict[str, Callable[[Hook], Hook]]] = {
    "fp16": default_hooks.fp16_compress_wrapper,
    "bf16": _wrapped_in_bf16,
}


def register(
    model: DistributedDataParallel,
    hook_type: str,
    wrapper_type: str,
    options: dict[str, Any],
) -> None:
    """Register a hook, in its wrapper; without a hook, do nothing.

    Args:
        model: the wrapped model.
        hook_type, wrapper_type: values of `DDPCommunicationHookType`.
        options: arguments of `PowerSGDState`.

    Raises:
        SettingError: the options are not arguments of `PowerSGDState`.
    """
    hook = _HOOKS_BY_NAME.get(hook_type)
    if hook is None:
        return
    wrap = _HOOK_WRAPPERS.get(wrapper_type)
    state = _power_sgd_state(options) if hook_type in _HOOKS_WITH_STATE else model.process_group
    model.register_comm_hook(state=state, hook=wrap(hook) if wrap else hook)


def _power_sgd_state(options: dict[str, Any]) -> powerSGD_hook.PowerSGDState:
    try:
        return powerSGD_hook.PowerSGDState(**{"process_group": None, **options})
    except (TypeError, ValueError, AssertionError) as error:
        raise SettingError(
            f"Cannot use DistributedDataParallelKwargs(comm_state_option={options!r}).",
            f"torch's PowerSGDState raised an error: {error}.",
            "Use arguments of PowerSGDState, such as {'matrix_approximation_rank': 2}.",
        ) from error
