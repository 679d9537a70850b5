"""Communication hooks: compressing gradients while they travel between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accel_plugins.ddp.batched_power_sgd import batched_power_sgd
from accel_plugins.ddp.hook_types import DDPCommunicationHookType
from accel_state.errors import SettingError

__all__ = ("register",)

Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


def _under_another_name(hook: Hook) -> Hook:
    """The same hook: torch refuses its own bf16 functions, by name, where it finds no CUDA, though gloo can do it."""

    def compress(state, bucket):  # type: ignore[no-untyped-def] # torch compares annotations with objects
        return hook(state, bucket)

    return compress


def _wrapped_in_bf16(hook: Hook) -> Hook:
    return _under_another_name(default_hooks.bf16_compress_wrapper(hook))


_HOOKS: Final[dict[DDPCommunicationHookType, Hook]] = {
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
    DDPCommunicationHookType.BF16: _under_another_name(default_hooks.bf16_compress_hook),
    DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
    DDPCommunicationHookType.BATCHED_POWER_SGD: batched_power_sgd,
}

_WITH_STATE: Final = frozenset({DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD})

_WRAPPERS: Final[dict[DDPCommunicationHookType, Callable[[Hook], Hook]]] = {
    DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
    DDPCommunicationHookType.BF16: _wrapped_in_bf16,
}


def register(
    model: DistributedDataParallel,
    hook_type: DDPCommunicationHookType,
    wrapper_type: DDPCommunicationHookType,
    options: dict[str, Any],
) -> None:
    """Register a hook, in its wrapper; without a hook nothing is done.

    Raises:
        SettingError: the options are none that a PowerSGD state takes.
    """
    hook = _HOOKS.get(hook_type)
    if hook is None:
        return
    wrap = _WRAPPERS.get(wrapper_type)
    state = _power_sgd_state(options) if hook_type in _WITH_STATE else model.process_group
    model.register_comm_hook(state=state, hook=wrap(hook) if wrap else hook)


def _power_sgd_state(options: dict[str, Any]) -> powerSGD_hook.PowerSGDState:
    try:
        return powerSGD_hook.PowerSGDState(**{"process_group": None, **options})
    except (TypeError, ValueError, AssertionError) as error:
        raise SettingError(
            f"Cannot use DistributedDataParallelKwargs(comm_state_option={options!r}).",
            f"torch's PowerSGDState refuses it: {error}.",
            "Give arguments of PowerSGDState, such as {'matrix_approximation_rank': 2}.",
        ) from error
