"""Builds a model without memory for its weights, or directly on a device."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from accel_state.settings.environ import read_setting
from accel_state.settings.schema import BOOLEAN, Setting

__all__ = ("init_empty_weights", "init_on_device")

INCLUDE_BUFFERS: Final = Setting("include_buffers", BOOLEAN, False, variable="ACCELERATE_INIT_INCLUDE_BUFFERS")
"""Whether buffers are created on the same device as parameters if the call does not set it."""

_lock = threading.Lock()
_here = threading.local()
_open = 0
_replacement: Any = None
_replaced: Any = None


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Models that are built inside have parameters without data, on the meta device.

    Args:
        include_buffers: create buffers there too; if None, from $ACCELERATE_INIT_INCLUDE_BUFFERS, else False.

    Example:
        >>> with init_empty_weights():
        ...     layer = nn.Linear(100_000, 100_000)
        >>> layer.weight.is_meta
        True
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Models that this thread builds inside have their parameters on `device`.

    With buffers, torch itself creates all tensors there, and a parameter made from an older tensor stays where that is.

    Args:
        device: device to which parameters move when they are registered.
        include_buffers: create every tensor there, buffers too; if None, from $ACCELERATE_INIT_INCLUDE_BUFFERS, else
            False.
    """
    device = torch.device(device)
    if include_buffers is None:
        setting = read_setting(INCLUDE_BUFFERS)
        include_buffers = bool(setting.value) if setting else False
    devices = getattr(_here, "devices", ())
    _here.devices = (*devices, device)
    try:
        with device if include_buffers else _replaced_registration():
            yield
    finally:
        _here.devices = devices


@contextmanager
def _replaced_registration() -> Iterator[None]:
    _patch(+1)
    try:
        yield
    finally:
        _patch(-1)


def _patch(change: int) -> None:
    """Replace the registration of parameters while any thread is inside; other threads are not affected."""
    global _open, _replacement, _replaced
    with _lock:
        _open += change
        register: Any = nn.Module.register_parameter
        if _open == 1 and change > 0:
            _replaced, _replacement = register, _registering(register)
            nn.Module.register_parameter = _replacement  # type: ignore[method-assign]
        elif not _open and register is _replacement:
            # If another library has replaced the function meanwhile, this one stays below it and does nothing.
            nn.Module.register_parameter = _replaced  # type: ignore[method-assign]


def _registering(register: Callable[..., None]) -> Callable[..., None]:
    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        devices = getattr(_here, "devices", ())
        if param is not None and devices and param.device != devices[-1]:
            module._parameters[name] = _moved(param, devices[-1])

    return functools.update_wrapper(register_parameter, register)


def _moved(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    """The parameter on another device, of the same class and with the attributes that libraries set on it."""
    data = param.detach().to(device)
    if type(data) is torch.Tensor:
        moved = torch.Tensor._make_subclass(type(param), data, param.requires_grad)
    else:
        # Tensors of device backends written in Python keep their class; torch marks them as parameters.
        moved = nn.Parameter(data, param.requires_grad)
    moved.__dict__.update(param.__dict__)
    return moved
