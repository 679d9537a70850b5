"""Building a model on the device of a run, with its initialisation or without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from accel_bigmodel.meta import init_on_device

__all__ = ("build_on_device",)


@contextmanager
def build_on_device(device: torch.device, *, empty: bool = False) -> Iterator[None]:
    """Models made inside, by this thread, have their parameters on the device.

    Args:
        device: where parameters go as they are registered.
        empty: initialise nothing: functions of `torch.nn.init` do nothing, and parameters have arbitrary values.
    """
    with init_on_device(device), _WithoutInitialisation() if empty else nullcontext():
        yield


class _WithoutInitialisation(TorchFunctionMode):
    """Lets functions of `torch.nn.init` return their tensor unchanged."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
