"""Disables dropout, so that runs can be compared, or records its masks.

The layers of torch and most models look up the functions in `torch.nn.functional` when they call them, so these
functions are replaced.
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
        noting: whether dropout is enabled and its masks are recorded; otherwise dropout is disabled.
        masks: for each call, the digests of input and mask, the probability, the size and the module.
        module: the innermost module whose forward is running.
    """

    def __init__(self) -> None:
        self.noting = False
        self.masks: list[list[Any]] = []
        self.module = ""

    def install(self) -> None:
        """Replace the functions of torch until the process ends."""
        functional: Any = nn.functional
        for name in _FUNCTIONS:
            setattr(nn.functional, name, self._controlled(getattr(nn.functional, name)))
        torch.dropout = self._controlled(torch.dropout)
        attention = functional.scaled_dot_product_attention

        def attend(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any) -> Any:
            # The masks of attention are not visible outside its kernels.
            given = dict(zip(("attn_mask", "dropout_p"), arguments[:2], strict=False)) | options
            given["dropout_p"] = 0.0
            return attention(query, key, value, **given, **_named(arguments[2:]))

        setattr(functional, _ATTENTION, attend)

    def _controlled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:  # noqa: A002
            if not self.noting or not training or p == 0.0:
                return input
            # Drop from ones instead of the input, in which zeros would hide what is dropped.
            state = torch.get_rng_state()
            kept = function(torch.ones_like(input), p, training) != 0
            torch.set_rng_state(state)
            self.masks.append([_digest(input), _digest(kept), float(p), int(kept.numel()), self.module])
            return function(input, p, training, inplace)

        return dropout


def without_recurrent_dropout(model: nn.Module) -> None:
    """Disable the dropout between the layers of recurrent networks, which their kernels apply."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0


def _named(arguments: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("is_causal", "scale", "enable_gqa"), arguments, strict=False))


def _digest(tensor: Tensor) -> str:
    return digests_of(tensor)["value"]
