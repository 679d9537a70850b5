"""From a prepared model back to the user's: the inverse of what wrapping, compiling and autocasting did."""

from __future__ import annotations

from functools import singledispatch
from typing import Any, Final

from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accel_plugins.layers import inside, is_compiled_module
from accel_plugins.precision.autocast import restore_forward

__all__ = ("COMPILED_IN_PLACE", "extract_model_from_parallel", "is_compiled_module", "wrapped_module")

COMPILED_IN_PLACE: Final = "_compiled_by_prepare"
"""On a block that `prepare` compiled without a wrapper."""


@singledispatch
def wrapped_module(model: Module) -> Module | None:
    """The module inside a wrapper that no strategy of this process made, or None when `model` is not a wrapper.

    Of what a strategy made, `Strategy.unwrap` tells.
    """
    return None


@wrapped_module.register(DataParallel)
@wrapped_module.register(DistributedDataParallel)
def _inside_parallel(model: Any) -> Module | None:
    inner: Module = model.module
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
        inner = _peel(model, keep_torch_compile)
        if inner is None:
            break
        compiled = model if compiled is None and is_compiled_module(model) else compiled
        model = inner
    if recursive:
        _peel_children(model)
    if not keep_fp32_wrapper:
        restore_forward(model)
    if not keep_torch_compile:
        _restore_blocks(model)
    return _compiled_like(compiled, model) if compiled is not None and keep_torch_compile else model


def _restore_blocks(model: Module) -> None:
    """Take the compiled calls off the blocks that `prepare` gave one; those that the user compiled stay."""
    for part in model.modules():
        if vars(part).pop(COMPILED_IN_PLACE, False):
            part._compiled_call_impl = None


def _peel(model: Module, keep_regions: bool) -> Module | None:
    if is_compiled_module(model):
        compiled: Any = model
        inner: Module = compiled._orig_mod
        return inner
    known = inside(model)
    if known is not None:
        return known
    # A module with compiled regions shares everything with the one it was made from.
    origin: Module | None = None if keep_regions else vars(model).get("_orig_mod")
    return wrapped_module(model) if origin is None else origin


def _peel_children(model: Module) -> None:
    for name, child in model.named_children():
        bare = child
        while (inner := inside(bare) or wrapped_module(bare)) is not None:
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
