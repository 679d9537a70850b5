"""Hooks around a module's forward: the interface, and functions that add and remove them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final, TypeVar

import torch
from torch import nn

from accel_state.errors import NotOffered
from accel_state.labels import DEVICE_MAP, HOOK, OLD_FORWARD

__all__ = (
    "ModelHook",
    "SequentialHook",
    "add_hook_to_module",
    "is_dispatched",
    "refuse_to_move",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
)

M = TypeVar("M", bound=nn.Module)

_MOVES: Final = ("to", "cuda", "cpu", "xpu", "npu", "float", "half", "bfloat16", "double")


class ModelHook:
    """Base class of hooks around the forward of a module; each method does nothing by default.

    After a method raises, no other method is called for that forward, so it must clean up itself.
    """

    no_grad: bool = False
    """Run the forward without gradients."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is added; returns the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before the forward; returns the arguments for the forward."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called after the forward; returns the output for the caller."""
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Called in place of `post_forward` when the forward raised."""

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is removed; returns the original module."""
        return module


class SequentialHook(ModelHook):
    """Combines several hooks: calls each method of all hooks, in the given order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for number, hook in enumerate(self.hooks):
            try:
                args, kwargs = hook.pre_forward(module, *args, **kwargs)
            except BaseException:
                _fail(self.hooks[:number], module)
                raise
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for number, hook in enumerate(self.hooks):
            try:
                output = hook.post_forward(module, output)
            except BaseException:
                _fail(self.hooks[number + 1 :], module)
                raise
        return output

    def forward_failed(self, module: nn.Module) -> None:
        _fail(self.hooks, module)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def _fail(hooks: Sequence[ModelHook], module: nn.Module) -> None:
    """Call `forward_failed` of all hooks in order after the forward failed, even if one of them raises."""
    with ExitStack() as stack:
        for hook in reversed(hooks):
            stack.callback(hook.forward_failed, module)


def add_hook_to_module(module: M, hook: ModelHook, append: bool = False) -> M:
    """Add a hook to a module, in place of an existing hook, or with `append=True` after it.

    The module keeps its class; `remove_hook_from_module` restores the module.

    Args:
        module: the module, whose `forward` then calls the hook before and after.
        hook: the hook; its `init_hook` may replace the module.
        append: keep an existing hook, and call the new one after it.

    Returns:
        The module that `init_hook` returned, which is `module` unless the hook replaces it.

    Example:
        class Doubled(ModelHook):
            def post_forward(self, module, output):
                return 2 * output

        add_hook_to_module(layer, Doubled())
    """
    before: ModelHook | None = getattr(module, HOOK, None)
    if before is not None:
        if append:
            _restore_forward(module)
        else:
            remove_hook_from_module(module)
    old_forward = module.forward
    # Past `Module.__setattr__`, which looks for parameters, buffers and modules of these names first.
    vars(module)[OLD_FORWARD] = old_forward
    module = hook.init_hook(module)  # type: ignore[assignment]
    vars(module)[HOOK] = SequentialHook(before, hook) if before is not None and append else hook
    # `partial` over a function of this module can be pickled and copied with the module; a closure cannot.
    module.forward = functools.update_wrapper(functools.partial(_hooked_forward, module), old_forward)
    return module


def _hooked_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    hook: ModelHook = getattr(module, HOOK)
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    try:
        forward = getattr(module, OLD_FORWARD)
        if hook.no_grad:
            with torch.no_grad():
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
    except BaseException:
        hook.forward_failed(module)
        raise
    return hook.post_forward(module, output)


def remove_hook_from_module(module: M, recurse: bool = False) -> M:
    """Remove the hook from a module, which may be moved again afterwards.

    Args:
        module: the module; a module without a hook is not changed.
        recurse: whether to remove the hooks of its submodules too.

    Returns:
        The module.
    """
    _take_off(module)
    _let_move(module)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def _take_off(module: nn.Module) -> None:
    hook: ModelHook | None = getattr(module, HOOK, None)
    if hook is not None:
        hook.detach_hook(module)
        delattr(module, HOOK)
    _restore_forward(module)


def _restore_forward(module: nn.Module) -> None:
    if hasattr(module, OLD_FORWARD):
        # Restore the class's method if the module called that one before.
        old_forward = getattr(module, OLD_FORWARD)
        delattr(module, OLD_FORWARD)
        module.forward = old_forward
        if getattr(old_forward, "__func__", None) is type(module).forward:
            del module.forward


def refuse_to_move(module: nn.Module) -> None:
    """Make methods such as `to` raise until the hooks are removed: moving would break the state of the hooks."""
    # `partial` over a function of this module can be pickled and copied with the module; a closure cannot.
    refusal = functools.partial(_refuse, type(module).__name__)
    for name in _MOVES:
        if hasattr(type(module), name):
            setattr(module, name, refusal)


def is_dispatched(model: nn.Module) -> bool:
    """Whether a device map of several places, or offloading, decides where weights of a model are.

    Such a model must not be moved as a whole, also if it is inside another one.
    """
    return any(
        len(set(map(str, (getattr(module, DEVICE_MAP, None) or {}).values()))) > 1 or _refuses_to_move(module)
        for module in model.modules()
    )


def _refuses_to_move(module: nn.Module) -> bool:
    return any(getattr(vars(module).get(name), "func", None) is _refuse for name in _MOVES)


def _refuse(name: str, *args: Any, **kwargs: Any) -> Any:
    raise NotOffered(
        f"Cannot move {name} to another device or dtype.",
        "Some of its modules are offloaded to the CPU or the disk.",
        "Remove the hooks first: remove_hook_from_submodules(model). Then load the weights that were never in memory.",
    )


def _let_move(module: nn.Module) -> None:
    for name in _MOVES:
        if getattr(vars(module).get(name), "func", None) is _refuse:
            delattr(module, name)


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks from a module and all its submodules."""
    remove_hook_from_module(module, recurse=True)
