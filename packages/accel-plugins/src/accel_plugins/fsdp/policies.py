"""From the names in the settings to the objects that `fully_shard` takes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.nn import Module, Parameter

from accel_plugins.blocks import blocks_by_size, blocks_of_class
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_state.errors import SettingError

__all__ = ("blocks_to_shard", "dtype_of", "ignored_parameters", "mixed_precision", "offload")

_SIZE = 100_000_000
"""Parameters that make a block when nothing was said, as launchers have it."""


def blocks_to_shard(model: Module, config: FullyShardedDataParallelPlugin) -> list[Module]:
    """The parts of a model that are sharded by themselves, the innermost first.

    Raises:
        SettingError: the classes of blocks are not known, or the model has none of them.
    """
    policy = config.auto_wrap_policy
    if policy is None or policy == "NO_WRAP":
        return []
    if callable(policy):
        return [part for part in reversed(list(model.modules())) if part is not model and policy(part)]
    if policy == "SIZE_BASED_WRAP":
        return blocks_by_size(model, _SIZE if config.min_num_params is None else config.min_num_params)
    names = config.transformer_cls_names_to_wrap or tuple(getattr(model, "_no_split_modules", None) or ())
    if not names:
        raise SettingError(
            f"Blocks of {type(model).__name__} were to be sharded by class (TRANSFORMER_BASED_WRAP).",
            "Their classes were not named, and the model does not name them.",
            "Give transformer_cls_names_to_wrap=['...'], or wrap by size.",
        )
    return [block for block in blocks_of_class(model, names) if block is not model]


def mixed_precision(config: FullyShardedDataParallelPlugin, compute: torch.dtype | None) -> MixedPrecisionPolicy:
    """In which dtypes parameters are gathered and gradients reduced.

    Args:
        config: the settings; their policy wins.
        compute: what forward computes in, or None for the dtype of the weights. Gradients of fp16 training travel in
            fp32, where the scale of the loss cannot make their sum overflow.
    """
    policy = config.mixed_precision_policy
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if isinstance(policy, str):
        policy = {"param_dtype": policy}
    if policy is None:
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=None if compute is None else torch.float32)
    given = policy if isinstance(policy, dict) else vars(policy)
    return MixedPrecisionPolicy(
        param_dtype=dtype_of(given.get("param_dtype")),
        reduce_dtype=dtype_of(given.get("reduce_dtype")),
        output_dtype=dtype_of(given.get("output_dtype")),
    )


def dtype_of(given: Any) -> torch.dtype | None:
    """The dtype that a text such as "bfloat16" or "torch.bfloat16" names; a dtype and None stay as they are."""
    if given is None:
        return None
    found = getattr(torch, str(given).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise SettingError(
            f"The dtype {given!r} was asked for in mixed_precision_policy.",
            "torch has no dtype of that name.",
            "Use a name such as 'bfloat16'.",
        )
    return found


def offload(config: FullyShardedDataParallelPlugin, pins_memory: bool) -> OffloadPolicy:
    """Where parameters lie between uses."""
    return CPUOffloadPolicy(pin_memory=pins_memory) if config.cpu_offload else OffloadPolicy()


def ignored_parameters(model: Module, config: FullyShardedDataParallelPlugin) -> set[Parameter]:
    """Parameters that stay whole on every process."""
    ignored = config.ignored_modules
    if ignored is None:
        return set()
    if isinstance(ignored, str):
        ignored = [part for name, part in model.named_modules() if re.fullmatch(ignored, name)]
    modules: Iterable[Any] = ignored
    return {parameter for module in modules for parameter in module.parameters()}
