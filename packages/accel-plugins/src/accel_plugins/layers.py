"""The layers around a user's model: which ones `prepare` added, and how to remove them.

`prepare` records the model that the strategy returned, the model inside it, and every layer that a transform added.
Only this module finds the strategy's model in these layers (`strategy_model`), which is the one that a strategy's
methods accept, and the user's model (`extract_model_from_parallel`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = (
    "COMPILED_IN_PLACE",
    "backend_of",
    "extract_model_from_parallel",
    "is_compiled_module",
    "model_of_optimizer",
    "prepared_models",
    "record_layer",
    "record_wrapped",
    "strategy_model",
)

COMPILED_IN_PLACE: Final = "_compiled_by_prepare"
"""Attribute of a block that `prepare` compiled without a wrapper."""


class _Layer(NamedTuple):
    """What `prepare` recorded about a module.

    Args:
        inner: the model inside it, or None where it does not wrap another one.
        backend: name of the backend that returned it, or None for the layer of a transform.
    """

    inner: weakref.ref[Module] | None
    backend: str | None


_layers: Final[weakref.WeakKeyDictionary[Module, _Layer]] = weakref.WeakKeyDictionary()


def record_wrapped(backend: str, unwrap: Callable[[Module], Module], models: Iterable[Module]) -> None:
    """Record the models that the `setup` of a backend's strategy returned.

    Args:
        backend: the name of the backend.
        unwrap: the strategy's `unwrap`.
        models: what `setup` returned.
    """
    for model in models:
        inner = unwrap(model)
        _layers[model] = _Layer(None if inner is model else weakref.ref(inner), backend)


def record_layer(layer: Module, model: Module) -> None:
    """Record the layer that a transform added around a strategy's model; no effect when it is the model itself."""
    if layer is not model:
        _layers[layer] = _Layer(weakref.ref(model), None)


def strategy_model(model: Module) -> Module:
    """The strategy's model inside all layers around it; a model without one is returned unchanged.

    Example:
        >>> with strategy.no_sync(strategy_model(model)):
        ...     strategy.backward(loss_function(model(batch)))
    """
    candidate: Module | None = model
    while candidate is not None:
        layer = _layers.get(candidate)
        if layer is not None and layer.backend is not None:
            return candidate
        candidate = _inside(candidate)
    return model


def backend_of(model: Module) -> str | None:
    """Name of the backend that returned a model, whatever layers are around it; None without one."""
    layer = _layers.get(strategy_model(model))
    return None if layer is None else layer.backend


def prepared_models() -> list[Module]:
    """The strategy's models of all Accelerators of this process that are still in use."""
    return [model for model, layer in _layers.items() if layer.backend is not None]


def model_of_optimizer(optimizer: Optimizer) -> Module | None:
    """The strategy's model that has all parameters of an optimizer, or None.

    Of several models with the same parameters, it is the one that was prepared last.
    """
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in reversed(prepared_models()):
        if parameters and parameters <= {id(parameter) for parameter in model.parameters()}:
            return model
    return None


def is_compiled_module(module: Module) -> bool:
    """Whether a module is the result of `torch.compile`."""
    # Without an import of the compiler nothing can be compiled, and the import takes seconds.
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
    # A module with compiled regions shares everything with the original module.
    origin: Module | None = None if keep_regions else vars(model).get("_orig_mod")
    return _inside_wrapper_of_torch(model) if origin is None else origin


def _inside_wrapper_of_torch(model: Any) -> Module | None:
    """The model inside a wrapper that the script, or torch inside another wrapper, added."""
    wrappers: Any = (DataParallel, DistributedDataParallel)
    if "torch.distributed.fsdp" in sys.modules:
        wrappers = (*wrappers, sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel)
    inner: Module | None = model.module if isinstance(model, wrappers) else None
    return inner


def extract_model_from_parallel(
    model: Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Module:
    """The user's model inside a prepared one: the same object that `prepare` received.

    The prepared model still works. Changes inside the model (its forward and compiled blocks) are common to both: if
    they are restored here, the prepared model loses them too.

    Args:
        model: a model that `prepare` returned, or any other module.
        keep_fp32_wrapper: keep the autocasting forward; False restores the original forward.
        keep_torch_compile: keep the model, or its blocks, compiled if `prepare` compiled them.
        recursive: also remove wrappers inside the model.
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
        # Only runs in a lower precision import the module of autocast.
        from accel_plugins.precision.native import restore_forward

        restore_forward(model)
    if not keep_torch_compile:
        _restore_blocks(model)
    return _compiled_like(compiled, model) if compiled is not None and keep_torch_compile else model


def _restore_blocks(model: Module) -> None:
    """Restore the blocks that `prepare` compiled; blocks that the user compiled remain compiled."""
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
    """`model`, compiled with the options of `compiled`; `compiled` itself when it already wraps that model."""
    if compiled._orig_mod is model:
        return compiled  # type: ignore[no-any-return]
    again: Module = type(compiled)(model, compiled.dynamo_ctx)
    return again
