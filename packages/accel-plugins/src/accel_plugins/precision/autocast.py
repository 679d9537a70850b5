"""Autocasting forward passes: a region that can be entered over and over, and a model whose forward runs inside one.

Making a `torch.autocast` costs more than entering it, and one instance must not be entered twice at a time. A `Region`
therefore keeps instances that were left and hands them out again.
"""

from __future__ import annotations

import functools
import threading
from types import MethodType, TracebackType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module

from accel_ops.conversion import convert_to_fp32

__all__ = ("ORIGINAL_FORWARD", "Region", "autocast_forward", "restore_forward")

ORIGINAL_FORWARD: Final = "_original_forward"
"""On a model whose forward autocasts: the forward it had before."""


class _Entered(threading.local):
    def __init__(self) -> None:
        self.stack: list[torch.autocast] = []


class Region:
    """`torch.autocast` with fixed arguments that may be entered any number of times, nested and from several threads.

    Args:
        device_type: type of torch device, such as "cpu".
        dtype: what eligible operations compute in.
        enabled: False switches autocast off inside.
        cache_enabled: keep cast weights until the outermost region is left; None leaves it to torch.
    """

    __slots__ = ("_arguments", "_entered", "_free")

    def __init__(
        self, device_type: str, dtype: torch.dtype, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        self._arguments = (device_type, dtype, enabled, cache_enabled)
        self._free: list[torch.autocast] = []
        self._entered = _Entered()

    def fresh(self) -> torch.autocast:
        """A `torch.autocast` of its own with these arguments."""
        return torch.autocast(*self._arguments)

    def __enter__(self) -> None:
        try:
            instance = self._free.pop()
        except IndexError:
            instance = self.fresh()
        instance.__enter__()  # type: ignore[no-untyped-call]
        self._entered.stack.append(instance)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        instance = self._entered.stack.pop()
        instance.__exit__(kind, error, trace)
        self._free.append(instance)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Region, self._arguments)


def autocast_forward(model: Module, region: Region) -> Module:
    """Make `model.forward` run inside the region and return fp32 in place of narrower floats; returns the model.

    The new forward is a method of the instance: a copy of the model gets one of its own, and a pickled one comes back
    with the forward of its class.
    """
    original = model.forward
    wrapped = functools.wraps(getattr(original, "__func__", original))(_forward_inside(region))
    setattr(model, ORIGINAL_FORWARD, original)
    setattr(model, "forward", MethodType(wrapped, model))  # noqa: B010 - a type checker refuses the assignment
    return model


def restore_forward(model: Module) -> Module:
    """Undo `autocast_forward`, where it was done; returns the model."""
    attributes = vars(model)
    original = attributes.pop(ORIGINAL_FORWARD, None)
    if original is not None:
        attributes.pop("forward", None)
        of_its_class = getattr(original, "__func__", None) is type(model).forward
        if not of_its_class:
            attributes["forward"] = original
    return model


def _forward_inside(region: Region) -> Any:
    compiling = torch.compiler.is_compiling

    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        original: Any = self._original_forward
        if compiling():
            # Dynamo traces torch's own context, and not our bookkeeping around it.
            with region.fresh():
                return convert_to_fp32(original(*args, **kwargs))
        with region:
            output = original(*args, **kwargs)
        if type(output) is Tensor:
            return output.float() if output.dtype in _NARROW else output
        return convert_to_fp32(output)

    return forward


_NARROW: Final = frozenset({torch.float16, torch.bfloat16})
