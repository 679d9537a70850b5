"""Optimizers of parameters that `prepare` shards: which ones can follow, and how a fresh state does."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from accel_state.errors import Conflict, NotOffered

__all__ = ("check_shardable", "has_stepped", "shard_state")

_UNSHARDABLE: Final = (torch.optim.Adafactor, torch.optim.Rprop)
"""Optimizers of torch whose step raises an error inside of torch for DTensors."""


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether an optimizer has state of training: a state with a step count of 0 was made by its constructor."""
    return any(float(state.get("step", 1)) != 0 for state in optimizer.state.values())


def check_shardable(optimizer: Optimizer, *, whole: bool = True) -> None:
    """Check that an optimizer can follow parameters that become shards.

    Args:
        optimizer: the user's optimizer.
        whole: each parameter becomes a DTensor, and does not become a part of a flat parameter.

    Raises:
        Conflict: it has already stepped.
        NotOffered: it cannot step parameters that are sharded in this way.
    """
    name = type(optimizer).__name__
    if has_stepped(optimizer):
        raise Conflict(
            f"Cannot prepare {name}.",
            "The optimizer has already stepped, and its state belongs to unsharded parameters.",
            "Prepare the optimizer before its first step, and load its state afterwards.",
        )
    if whole and isinstance(optimizer, _UNSHARDABLE):
        raise NotOffered(
            f"Cannot prepare {name} of a model with sharded parameters.",
            f"The step of {name} uses operations that torch does not have for sharded tensors (DTensor).",
            "Use another optimizer, such as AdamW, or a backend that does not shard parameters, such as ddp.",
        )
    if any(
        isinstance(value, Tensor) and value.is_meta for state in optimizer.state.values() for value in state.values()
    ):
        raise NotOffered(
            f"Cannot prepare {name}.",
            f"{name} makes its state in its constructor, and the parameters were on the meta device.",
            "Create it after prepare(model), or build the model with its weights.",
        )
    if not whole and optimizer.state:
        raise NotOffered(
            f"Cannot prepare {name} with version 1 of FSDP.",
            f"{name} makes its state in its constructor, for parameters that FSDP joins to flat ones afterwards.",
            "Use version 2 of FSDP (fsdp_version=2), or an optimizer that makes its state in its first step.",
        )


def shard_state(state: dict[str, Any], parameter: Parameter) -> dict[str, Any]:
    """The fresh state of a parameter that became a DTensor: tensors of its shape are sharded like it."""
    if not isinstance(parameter, DTensor):
        return state

    def sharded(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.shape != parameter.shape:
            return value
        # Every process has the whole tensor, so nothing needs to be sent.
        local = value.to(parameter.device)
        return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)

    return {name: sharded(value) for name, value in state.items()}
