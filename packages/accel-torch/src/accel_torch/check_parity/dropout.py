"""Dropout that is turned off, so that runs can be compared, or whose masks are noted.

Layers of torch call the functions of `torch.nn.functional` by name, and so do most models. These are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from accel_torch.check_resume.digests import digests_of

__all__ = ("Dropout", "without_recurrent_dropout")

_FUNCTIONS: Final = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)
_ATTENTION: Final = "scaled_dot_product_attention"


class Dropout:
    """The dropout of all models of this process.

    Attributes:
        noting: whether dropout works, and its masks are noted; off otherwise.
        masks: of each call: digests of its input and of its mask, its probability, its size and its module.
        module: the innermost module of a model that is called.
    """

    def __init__(self) -> None:
        self.noting = False
        self.masks: list[list[Any]] = []
        self.module = ""

    def install(self) -> None:
        """Replace the functions of torch, for as long as the process lives."""
        functional: Any = nn.functional
        for name in _FUNCTIONS:
            setattr(functional, name, self._controlled(getattr(functional, name)))
        torch.dropout = self._controlled(torch.dropout)
        attention = functional.scaled_dot_product_attention

        def attend(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Any:
            # Masks of attention are inside of its kernels.
            given = dict(zip(("attn_mask", "dropout_p"), arguments[:2], strict=False)) | options
            given["dropout_p"] = 0.0
            return attention(query, key, value, **given, **_named(arguments[2:]))

        setattr(functional, _ATTENTION, attend)

    def _controlled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002
            if not self.noting or not training or p == 0.0:
                return input
            # What is drawn does not depend on the input, whose zeros would hide what is dropped.
            state = torch.get_rng_state()
            kept = function(torch.ones_like(input), p, training) != 0
            torch.set_rng_state(state)
            self.masks.append([_digest(input), _digest(kept), float(p), int(kept.numel()), self.module])
            return function(input, p, training, inplace)

        return dropout


def without_recurrent_dropout(model: nn.Module) -> None:
    """Turn off the dropout between the layers of recurrent networks, which is inside of their kernels."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0


def _named(arguments: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("is_causal", "scale", "enable_gqa"), arguments, strict=False))


def _digest(tensor: Tensor) -> str:
    return digests_of(tensor)["value"]
