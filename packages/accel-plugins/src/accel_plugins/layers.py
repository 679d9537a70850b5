"""The layers around a user's model: what `prepare` put there, and how they come off.

`prepare` notes the model that the strategy made, the model inside it, and every layer that a transform put around it.
Two questions are answered here alone: which model in these layers the strategy made, since a strategy is asked about no
other one (`strategy_model`), and which model the user gave (`extract_model_from_parallel`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

__all__ = (
    "COMPILED_IN_PLACE",
    "extract_model_from_parallel",
    "is_compiled_module",
    "maker_of",
    "note_layer",
    "note_made",
    "strategy_model",
)

COMPILED_IN_PLACE: Final = "_compiled_by_prepare"
"""On a block that `prepare` compiled without a wrapper."""


class Unwraps(Protocol):
    """What is asked of a strategy here."""

    def unwrap(self, model: Module) -> Module:
        """What its `setup` wrapped."""


class _Layer(NamedTuple):
    """What is known of a module.

    Args:
        inner: the model inside it, or None where it is not around another one.
        maker: name of the backend whose strategy made it, or None for the layer of a transform.
    """

    inner: weakref.ref[Module] | None
    maker: str | None


_layers: Final[weakref.WeakKeyDictionary[Module, _Layer]] = weakref.WeakKeyDictionary()


def note_made(backend: str, strategy: Unwraps, models: Iterable[Module]) -> None:
    """Note models that the `setup` of a backend's strategy returned."""
    for model in models:
        inner = strategy.unwrap(model)
        _layers[model] = _Layer(None if inner is model else weakref.ref(inner), backend)


def note_layer(layer: Module, model: Module) -> None:
    """Note what a transform put around a model that a strategy made; nothing where it is the model itself."""
    if layer is not model:
        _layers[layer] = _Layer(weakref.ref(model), None)


def strategy_model(model: Module) -> Module:
    """The model that a strategy made, in all layers around it; a model that no strategy made stays as it is.

    Example:
        >>> with strategy.no_sync(strategy_model(model)):
        ...     strategy.backward(loss_function(model(batch)))
    """
    found: Module | None = model
    while found is not None:
        layer = _layers.get(found)
        if layer is not None and layer.maker is not None:
            return found
        found = _inside(found)
    return model


def maker_of(model: Module) -> str | None:
    """Name of the backend that made a model, whatever is around it; None for a model that none made."""
    layer = _layers.get(strategy_model(model))
    return None if layer is None else layer.maker


def is_compiled_module(module: Module) -> bool:
    """Whether a module is the result of `torch.compile`."""
    # Nothing is compiled before the compiler is imported, and importing it takes seconds.
    return "torch._dynamo" in sys.modules and isinstance(module, torch._dynamo.eval_frame.OptimizedModule)


def _inside(model: Module, keep_regions: bool = True) -> Module | None:
    """The model inside the outermost layer, or None for a model without layers."""
    if is_compiled_module(model):
        compiled: Any = model
        inner: Module = compiled._orig_mod
        return inner
    layer = _layers.get(model)
    if layer is not None:
        return None if layer.inner is None else layer.inner()
    # A module with compiled regions shares everything with the one it was made from.
    origin: Module | None = None if keep_regions else vars(model).get("_orig_mod")
    return _inside_wrapper_of_torch(model) if origin is None else origin


def _inside_wrapper_of_torch(model: Any) -> Module | None:
    """The model inside a wrapper that the script, or torch inside another wrapper, put around it."""
    wrappers: Any = (DataParallel, DistributedDataParallel)
    if "torch.distributed.fsdp" in sys.modules:
        wrappers = (*wrappers, sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel)
    inner: Module | None = model.module if isinstance(model, wrappers) else None
    return inner


def extract_model_from_parallel(
    model: Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Module:
    """The user's model inside a prepared one, which is the very object that went into `prepare`.

    The prepared one goes on working. What was changed inside of the model, and not around it, is the same for both: the
    forward and compiled blocks. Where they are restored, the prepared model has them no longer either.

    Args:
        model: what `prepare` returned, or any other module.
        keep_fp32_wrapper: leave the autocasting forward on; False restores the forward the model had.
        keep_torch_compile: leave what `prepare` compiled, the model or its blocks, compiled.
        recursive: also look for wrappers inside the model and take them out.
    """
    compiled: Module | None = None
    while True:
        inner = _inside(model, keep_torch_compile)
        if inner is None:
            break
        compiled = model if compiled is None and is_compiled_module(model) else compiled
        model = inner
    if recursive:
        _peel_children(model)
    if not keep_fp32_wrapper:
        # What autocasts is imported by runs in a lower precision.
        from accel_plugins.precision.native import restore_forward

        restore_forward(model)
    if not keep_torch_compile:
        _restore_blocks(model)
    return _compiled_like(compiled, model) if compiled is not None and keep_torch_compile else model


def _restore_blocks(model: Module) -> None:
    """Take the compiled calls off the blocks that `prepare` gave one; those that the user compiled stay."""
    for part in model.modules():
        if vars(part).pop(COMPILED_IN_PLACE, False):
            part._compiled_call_impl = None


def _peel_children(model: Module) -> None:
    for name, child in model.named_children():
        bare = child
        while (inner := None if is_compiled_module(bare) else _inside(bare)) is not None:
            bare = inner
        if bare is not child:
            setattr(model, name, bare)
        _peel_children(bare)


def _compiled_like(compiled: Any, model: Module) -> Module:
    """`model` compiled the way `compiled` is; `compiled` itself when it is around that model already."""
    if compiled._orig_mod is model:
        return compiled  # type: ignore[no-any-return]
    again: Module = type(compiled)(model, compiled.dynamo_ctx)
    return again
