"""The first module whose output is not finite, found by repeating a forward pass (`locate=True`)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.rng import restore, snapshot
from accel_ops.tree import leaves_with_paths
from accel_plugins.layers import strategy_model
from accel_plugins.parameters import canonical_name

if TYPE_CHECKING:
    from torch.nn import Module

    from accel_torch.session import Session
    from accel_torch.step_guard.window import Window

__all__ = ("ForwardInputs",)


class ForwardInputs:
    """Keeps the inputs of the forward passes of a window, to repeat one of them.

    Args:
        window: the window.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._number = 0
        self._kept: list[tuple[weakref.ref[Module], tuple[Any, ...], dict[str, Any]]] = []
        self._repeats = False

    def follow(self, models: Sequence[Module]) -> None:
        """Keep the inputs of prepared models from now on."""
        for model in models:
            model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, model: Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._repeats or not model.training or torch.compiler.is_compiling():
            return
        if self._window.has_ended and self._number != self._window.number:
            self._kept.clear()
            self._number = self._window.number
        self._kept.append((weakref.ref(model), arguments, named))

    def first_bad(self, session: Session, micro_batch: int) -> str | None:
        """Name of the first module whose output is not finite, in the forward pass of a micro-batch; or None.

        Called on every process with the same number, because a forward pass may communicate. Buffers and generators
        are as before afterwards.
        """
        passes = len(self._kept) // max(len(self._window.losses), 1) or 1
        chosen = self._kept[micro_batch * passes : (micro_batch + 1) * passes]
        generators = snapshot()
        self._repeats = True
        names: list[str] = []
        try:
            # All of them, on every process.
            for referred, arguments, named in chosen:
                model = referred()
                if model is not None:
                    names += _repeated(session, model, arguments, named)
        finally:
            self._repeats = False
            restore(generators)
        return names[0] if names else None


def _repeated(session: Session, model: Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[str]:
    inner = session.strategy.unwrap(strategy_model(model))
    buffers = [(buffer, buffer.detach().clone()) for buffer in inner.buffers()]
    found: list[str] = []
    handles = [
        module.register_forward_hook(_check(canonical_name(name) or type(module).__name__, found), always_call=False)
        for name, module in inner.named_modules()
    ]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            inner(*arguments, **named)
    finally:
        for handle in handles:
            handle.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
    return found


def _check(name: str, found: list[str]) -> Any:
    def check(module: Module, inputs: Any, outputs: Any) -> None:
        for _, leaf in leaves_with_paths(outputs):
            is_floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            if not found and is_floating and not bool(torch.isfinite(leaf).all()):
                found.append(name)

    return check
