"""Layers around the model that a strategy made, such as `torch.compile` of the whole model.

A strategy is asked about models that it made itself. What `prepare` returns may have further layers around these, which
transforms put there, or a user who compiles a prepared model. Whoever prepares notes what became of each model; whoever
asks a strategy about a model asks about `strategy_model(model)`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any, Final, Protocol

import torch
from torch.nn import Module

__all__ = ("inside", "is_compiled_module", "note_layer", "note_made", "strategy_model")


class Unwraps(Protocol):
    """What is asked of a strategy here."""

    def unwrap(self, model: Module) -> Module:
        """What its `setup` wrapped."""


_makers: Final[weakref.WeakKeyDictionary[Module, weakref.ref[Unwraps]]] = weakref.WeakKeyDictionary()
"""By model that a strategy made: that strategy."""

_layers: Final[weakref.WeakKeyDictionary[Module, Module]] = weakref.WeakKeyDictionary()
"""By layer that a transform put around a model: that model."""


def note_made(strategy: Unwraps, models: Iterable[Module]) -> None:
    """Note models that the `setup` of a strategy returned."""
    maker = weakref.ref(strategy)
    for model in models:
        _makers[model] = maker


def note_layer(layer: Module, model: Module) -> None:
    """Note what a transform put around a model that a strategy made; nothing where it is the model itself."""
    if layer is not model:
        _layers[layer] = model


def strategy_model(model: Module) -> Module:
    """The model that a strategy made, in all layers around it; a model that no strategy made stays as it is.

    Example:
        >>> with strategy.no_sync(strategy_model(model)):
        ...     strategy.backward(loss_function(model(batch)))
    """
    found: Any = model
    while isinstance(found, Module) and found not in _makers:
        found = _layers.get(found, found._orig_mod if is_compiled_module(found) else None)
    return model if found is None else found


def inside(model: Module) -> Module | None:
    """What a layer, or the wrapper of a strategy, is around; None for a model that is neither."""
    if model in _layers:
        return _layers[model]
    maker = _makers.get(model)
    strategy = None if maker is None else maker()
    if strategy is None:
        return None
    inner = strategy.unwrap(model)
    return None if inner is model else inner


def is_compiled_module(module: Module) -> bool:
    """Whether a module is the result of `torch.compile`."""
    # Nothing is compiled before the compiler is imported, and importing it takes seconds.
    return "torch._dynamo" in sys.modules and isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
