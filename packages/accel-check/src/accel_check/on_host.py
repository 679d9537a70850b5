"""Lets a script that names an accelerator run in a plan, whose tensors are all on the host."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

__all__ = ("OnHost", "named_on_host", "use_no_accelerator")

_ACCELERATOR: Final = re.compile(r"(cuda|xpu|hpu|npu|mps)(:\d+)?")
_SKIPPED: Final = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed_all")
"""Functions of `torch.cuda` that need a device and return nothing."""


def _on_host(value: Any) -> Any:
    named = value.type if isinstance(value, torch.device) else value
    return "cpu" if isinstance(named, str) and _ACCELERATOR.fullmatch(named) else value


def named_on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called with the host instead of each accelerator among its arguments."""

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        return function(*map(_on_host, arguments), **{name: _on_host(value) for name, value in options.items()})

    return called


class OnHost(TorchFunctionMode):
    """A block in which functions of torch receive the host instead of an accelerator."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map(_on_host, (tuple(args), dict(kwargs or {})))
        return function(*args, **kwargs)


def use_no_accelerator() -> None:
    """Let what a script calls of `torch.cuda` do nothing, and autocast choose the host, until this process ends."""

    def skipped(*_: Any, **__: Any) -> None:
        return None

    for name in _SKIPPED:
        setattr(torch.cuda, name, skipped)
    torch.cuda.current_device = lambda: 0
    autocast: Any = torch.autocast
    autocast.__init__ = named_on_host(autocast.__init__)
