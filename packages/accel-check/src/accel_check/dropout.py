"""Turns dropout off, so that runs can be compared, and notes where the script would have drawn a mask.

The layers of torch and most models look up the functions of `torch.nn.functional` when they call them, so these
functions are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

__all__ = ("turn_off_dropout", "turn_off_recurrent_dropout")

_FUNCTIONS: Final = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def turn_off_dropout(drawn: Callable[[], None]) -> None:
    """Replace the functions of torch until the process ends.

    Args:
        drawn: called where a mask would be drawn.
    """
    functional: Any = nn.functional

    def identity(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
        if training and p:
            drawn()
        return input

    for name in _FUNCTIONS:
        setattr(functional, name, identity)
    torch.dropout = identity  # type: ignore[assignment]
    attention = functional.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Any:
        names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = dict(zip(names, arguments, strict=False)) | options
        if given.pop("dropout_p", 0.0):
            drawn()
        return attention(query, key, value, **given)

    functional.scaled_dot_product_attention = attend


def turn_off_recurrent_dropout(model: nn.Module) -> None:
    """Turn off the dropout between the layers of recurrent networks, which their kernels apply."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
