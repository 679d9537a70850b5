"""Moves one tensor of a module to a device, or sets a new value there."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from accel_bigmodel.device_map import Device, resolve_device
from accel_bigmodel.sizes import torch_dtype
from accel_state.devices.select import family_of
from accel_state.errors import SettingError, ShapeMismatch

__all__ = ("TiedParameters", "parameter_like", "set_module_tensor_to_device", "submodule_and_leaf")

TiedParameters: TypeAlias = "MutableMapping[int, MutableMapping[torch.device, Tensor]]"
"""Address of a tied weight to its copies by device, so that all its names share one copy."""


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: TiedParameters | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Move a parameter or buffer to `device`, or replace it by `value` there.

    Args:
        tensor_name: name of the tensor; with dots, of a tensor in a submodule.
        device: target device.
        value: new data of the same shape; without `dtype` it is converted to the dtype of the replaced tensor.
        dtype: target dtype.
        fp16_statistics: scales of an 8-bit weight, stored in its attribute `SCB`.
        tied_params_map: existing copies of tied weights; a new copy is added.
        non_blocking: do not wait for copies from pinned memory.
        clear_cache: return freed memory to the device when the tensor leaves it.

    Raises:
        SettingError: there is no such tensor or device, or a tensor without data cannot move without a `value`.
        ShapeMismatch: `value` has another shape.
    """
    owner, leaf = submodule_and_leaf(module, tensor_name)
    old = _tensor(owner, leaf, tensor_name)
    target = resolve_device(device)
    if value is None and old.is_meta and target.type != "meta":
        raise SettingError(
            f"Cannot move {tensor_name!r} to {target}.",
            "It is on the meta device and has no data.",
            "Pass its data as value=.",
        )
    if value is not None and value.shape != old.shape and type(old) in (Tensor, nn.Parameter):
        raise ShapeMismatch(
            f"Cannot set {tensor_name!r} of {type(module).__name__}.",
            f"The new value has shape {tuple(value.shape)}, the module expects {tuple(old.shape)}.",
            "Load weights of the same architecture.",
        )
    data = _on_device(
        old if value is None else value, target, _wanted_dtype(old, value, dtype), tied_params_map, non_blocking
    )
    if data is old:
        return
    _assign(owner, leaf, old, data, fp16_statistics)
    if clear_cache and old.device != target and not old.is_meta:
        family_of(old.device).empty_cache()


def submodule_and_leaf(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """The module that owns a tensor, and the tensor's name in it.

    Raises:
        SettingError: there is no such module.
    """
    path, _, leaf = tensor_name.rpartition(".")
    try:
        return module.get_submodule(path), leaf
    except AttributeError as error:
        raise SettingError(
            f"Cannot find {tensor_name!r} in {type(module).__name__}.", f"{error}.", "Check the spelling of the name."
        ) from None


def _tensor(owner: nn.Module, leaf: str, name: str) -> Tensor:
    tensor: Tensor | None = owner._parameters.get(leaf)
    tensor = owner._buffers.get(leaf) if tensor is None else tensor
    if tensor is None:
        raise SettingError(
            f"Cannot find {name!r} in {type(owner).__name__}.",
            "It has no parameter or buffer with that name.",
            "Check the spelling.",
        )
    return tensor


def _wanted_dtype(old: Tensor, value: Tensor | None, dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype to convert to, or None to keep it: integers and bools are never converted."""
    data = old if value is None else value
    if not data.dtype.is_floating_point:
        return None
    if dtype is not None:
        return torch_dtype(dtype)
    return old.dtype if old.dtype.is_floating_point else None


def _on_device(
    data: Tensor,
    target: torch.device,
    dtype: torch.dtype | None,
    tied: TiedParameters | None,
    non_blocking: bool,
) -> Tensor:
    copies: MutableMapping[torch.device, Tensor] = {}
    if tied is not None and not data.is_meta:
        copies = tied.get(data.data_ptr(), copies)
    if target in copies:
        return copies[target]
    moved = data.to(device=target, dtype=dtype or data.dtype, non_blocking=non_blocking)
    if tied is not None and not data.is_meta and data.data_ptr() in tied:
        copies[target] = moved
    return moved


def _assign(owner: nn.Module, leaf: str, old: Tensor, data: Tensor, fp16_statistics: Tensor | None) -> None:
    """Replace the old tensor by the new one, as a parameter of the same class if it was a parameter."""
    if leaf in owner._buffers:
        owner._buffers[leaf] = data
        return
    # A tensor with a special class, such as one of bitsandbytes, has its own attributes.
    parameter = parameter_like(data if type(data) is type(old) else old, data.detach(), _requires_grad(old, data))
    if fp16_statistics is not None:
        parameter.SCB = fp16_statistics.to(data.device)  # type: ignore[attr-defined]
    owner._parameters[leaf] = parameter


def _requires_grad(old: Tensor, data: Tensor) -> bool:
    return old.requires_grad and (data.dtype.is_floating_point or data.dtype.is_complex)


def parameter_like(old: Tensor, data: Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter with the class of another one, and with the attributes that libraries set on that one."""
    kind: Any = type(old)
    if kind is nn.Parameter or not issubclass(kind, nn.Parameter):
        # The tensors of devices that are written in Python, for example, are marked as parameters, not of that class.
        return nn.Parameter(data, requires_grad)
    return kind(data, requires_grad=requires_grad, **vars(old))  # type: ignore[no-any-return]
