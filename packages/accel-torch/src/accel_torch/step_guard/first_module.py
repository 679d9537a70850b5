"""The first module whose output is not finite, found by repeating the forward passes of a step (`locate=True`)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.rng import restore, snapshot
from accel_ops.tree import leaves_with_paths
from accel_plugins.layers import strategy_model
from accel_plugins.parameters import canonical_name
from accel_torch.step_guard.buffers import BufferCopies

if TYPE_CHECKING:
    from torch.nn import Module

    from accel_torch.session import Session
    from accel_torch.step_guard.window import Window

__all__ = ("ForwardInputs",)


class ForwardInputs:
    """Keeps the inputs of the forward passes of a window, to repeat them.

    Args:
        window: the window.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._cleared_at = 0
        self._passes: list[tuple[weakref.ref[Module], tuple[Any, ...], dict[str, Any]]] = []
        self._repeats = False

    def follow(self, models: Sequence[Module]) -> None:
        """Keep the inputs of prepared models from now on."""
        for model in models:
            model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, model: Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._repeats or not model.training or torch.compiler.is_compiling():
            return
        if self._window.has_ended and self._cleared_at != self._window.backwards:
            # The first forward pass of the next window.
            self._passes.clear()
            self._cleared_at = self._window.backwards
        self._passes.append((weakref.ref(model), arguments, named))

    def first_bad(self, session: Session) -> str | None:
        """Name of the first module whose output is not finite, in the forward passes of the window; or None.

        Called on every process, because a forward pass may communicate. Buffers and generators are as before
        afterwards.
        """
        names: list[str] = []
        generators = snapshot()
        self._repeats = True
        try:
            for reference, arguments, named in self._passes:
                if (model := reference()) is not None:
                    _repeat(session, model, arguments, named, names)
        finally:
            self._repeats = False
            restore(generators)
        return names[0] if names else None


def _repeat(
    session: Session, model: Module, arguments: tuple[Any, ...], named: dict[str, Any], names: list[str]
) -> None:
    """Repeat a forward pass, and add the names of the modules whose outputs are not finite."""
    inner = session.strategy.unwrap(strategy_model(model))
    buffers = BufferCopies(session, [model])
    handles = [
        module.register_forward_hook(partial(_check, canonical_name(name) or type(module).__name__, names))
        for name, module in inner.named_modules()
    ]
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            inner(*arguments, **named)
    finally:
        for handle in handles:
            handle.remove()
        buffers.put_back()


def _check(name: str, names: list[str], module: Module, inputs: Any, outputs: Any) -> None:
    values = [leaf for _, leaf in leaves_with_paths(outputs) if isinstance(leaf, torch.Tensor)]
    if not all(bool(torch.isfinite(value).all()) for value in values if value.is_floating_point()):
        names.append(name)
