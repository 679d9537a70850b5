"""Policies that settings choose by name: which blocks are sharded separately, by their classes or by size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.nn import Module

from accel_plugins.blocks import blocks_of_class
from accel_state.errors import SettingError

__all__ = ("block_classes", "named_policy")

_DEFAULT_MIN_PARAMETERS: Final = 100_000_000
"""The minimum number of parameters of a block, as in launchers."""


def named_policy(
    model: Module, name: str, min_num_params: int | None, class_names: Sequence[str] | None
) -> Callable[..., bool] | None:
    """Torch's policy for a model; None for one without blocks.

    Args:
        model: the model to shard.
        name: "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP" or "NO_WRAP".
        min_num_params: the minimum number of parameters of a block chosen by size; None: 100 million.
        class_names: names of the block classes; None or empty: those that the model declares.

    Raises:
        SettingError: no classes are specified, or the model has none of them.
    """
    if name == "TRANSFORMER_BASED_WRAP":
        classes = block_classes(model, class_names)
        return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
    least = _DEFAULT_MIN_PARAMETERS if min_num_params is None else min_num_params
    if name == "SIZE_BASED_WRAP" and least > 0:
        return functools.partial(size_based_auto_wrap_policy, min_num_params=least)
    return None


def block_classes(model: Module, names: Sequence[str] | None) -> set[type[Module]]:
    """The block classes with these names, else those that the model declares.

    Raises:
        SettingError: no classes are specified, or the model has none of them.
    """
    names = names or tuple(getattr(model, "_no_split_modules", None) or ())
    if not names:
        raise SettingError(
            f"Cannot shard blocks of {type(model).__name__} by class (TRANSFORMER_BASED_WRAP).",
            "Neither the settings nor the model specify the classes.",
            "Set transformer_cls_names_to_wrap=['...'], or wrap by size.",
        )
    return {type(block) for block in blocks_of_class(model, names)}
