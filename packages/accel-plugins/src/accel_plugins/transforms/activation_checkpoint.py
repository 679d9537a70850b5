"""Activation checkpointing: blocks free their activations after forward and compute them again in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from accel_plugins.blocks import repeated_blocks
from accel_plugins.transform import Stage, Transform
from accel_state.errors import SettingError

if TYPE_CHECKING:
    from accel_plugins.bundle import Bundle
    from accel_plugins.context import Context

__all__ = ("ActivationCheckpoint",)

_PLAIN_FORWARD: Final = "_forward_that_keeps_activations"


class ActivationCheckpoint(Transform):
    """Recomputes the activations of blocks in backward.

    Parameter names do not change, because only the forward of each block is replaced.

    Args:
        select: returns the blocks of a model; by default those in its lists of blocks of one class.
        offload: move activations to host memory instead of recomputing them.
    """

    name: ClassVar[str] = "activation checkpointing"
    stage: ClassVar[Stage] = Stage.RECOMPUTE

    def __init__(self, select: Callable[[Module], Iterable[Module]] = repeated_blocks, offload: bool = False) -> None:
        self._select = select
        self._offload = offload

    def check(self, bundle: Bundle, context: Context) -> None:
        for model in bundle.models:
            self._blocks(model)

    def _blocks(self, model: Module) -> list[Module]:
        """The blocks, or none if activation checkpointing is applied already.

        Raises:
            SettingError: the model has no blocks.
        """
        blocks = list(self._select(model))
        if not blocks:
            raise SettingError(
                f"Cannot checkpoint activations of {type(model).__name__}.",
                "The model has no list of blocks of one class, or no block of the selected classes.",
                "Specify the class names of its blocks, or turn activation checkpointing off.",
            )
        return [block for block in blocks if _PLAIN_FORWARD not in vars(block)]

    def apply(self, model: Module, context: Context) -> Module:
        for block in self._blocks(model):
            plain = block.forward
            changed = (_kept_on_host if self._offload else _recomputed)(getattr(plain, "__func__", plain))
            setattr(block, _PLAIN_FORWARD, plain)
            setattr(block, "forward", MethodType(changed, block))  # noqa: B010 - a type checker refuses the assignment
        return model

    def undo(self, model: Module) -> Module:
        for block in model.modules():
            plain = vars(block).pop(_PLAIN_FORWARD, None)
            if plain is None:
                continue
            vars(block).pop("forward")
            if getattr(plain, "__func__", None) is not type(block).forward:
                vars(block)["forward"] = plain
        return model


def _recomputed(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        kept: Any = self._forward_that_keeps_activations
        if not torch.is_grad_enabled():
            return kept(*args, **kwargs)
        return checkpoint(kept, *args, use_reentrant=False, **kwargs)

    return forward


def _kept_on_host(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        kept: Any = self._forward_that_keeps_activations
        with torch.autograd.graph.save_on_cpu():
            return kept(*args, **kwargs)

    return forward
