"""Functions for loss scalers and autocast, for code that does not use an Accelerator for them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from accel_plugins.precision.select import choose
from accel_state import current
from accel_state.labels import DistributedType
from accel_state.run_state import AcceleratorState


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Create a scaler for fp16 losses on this process's device.

    Args:
        distributed_type: kind of the run; for FSDP the scaler checks the gradients of all processes for overflows.
        kwargs: arguments of `GradScalerKwargs`.
    """
    family = current.process_or_start().family
    make: Any = _SCALERS.get(distributed_type, lambda name, **options: family.grad_scaler(**options))
    scaler: torch.amp.GradScaler = make(family.name, **kwargs)
    return scaler


def _sharded(name: str, **kwargs: Any) -> torch.amp.GradScaler:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    return ShardedGradScaler(device=name, **kwargs)


_SCALERS: Final[dict[DistributedType | None, Any]] = {DistributedType.FSDP: _sharded}


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[None]:
    """A block in which operations compute in the run's precision; without `native_amp` it does nothing.

    Args:
        native_amp: whether to use torch's autocast.
        autocast_kwargs: an `AutocastKwargs`, or None.
    """
    if not native_amp:
        return nullcontext()
    handlers = [] if autocast_kwargs is None else [autocast_kwargs]
    return choose(AcceleratorState().mixed_precision, current.process().family, handlers).autocast()
