"""Functions whose error texts callers compare; otherwise equal to the functions of the same name in lower packages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accel_bigmodel import tensors
from accel_ops import tree
from accel_state.errors import ShapeMismatch, UnknownKind

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from accel_bigmodel.device_map import Device


@functools.wraps(tree.recursively_apply)
def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = tree.is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """`accel_ops.recursively_apply`, with another text for an object that it does not take."""
    try:
        return tree.recursively_apply(
            func, data, *args, test_type=test_type, error_on_other_type=error_on_other_type, **kwargs
        )
    except UnknownKind as error:
        others = [leaf for _, leaf in tree.leaves_with_paths(data) if not test_type(leaf)]
        if not (error_on_other_type and others):
            raise
        raise UnknownKind(
            f"Unsupported types ({type(others[0])}) passed to `{tree.function_name(func)}`. Only nested "
            f"list/tuple/dicts of objects that are valid for `{tree.function_name(test_type)}` should be passed."
        ) from error


@functools.wraps(tensors.set_module_tensor_to_device)
def set_module_tensor_to_device(
    module: Module, tensor_name: str, device: Device, value: Tensor | None = None, *args: Any, **kwargs: Any
) -> None:
    """`accel_bigmodel.set_module_tensor_to_device`, with another text for a value of another shape."""
    try:
        tensors.set_module_tensor_to_device(module, tensor_name, device, value, *args, **kwargs)
    except ShapeMismatch as error:
        owner, leaf = tensors.submodule_and_leaf(module, tensor_name)
        raise ShapeMismatch(
            f'Trying to set a tensor of shape {getattr(value, "shape", None)} in "{leaf}" (which has shape '
            f"{getattr(owner, leaf).shape}), this looks incorrect."
        ) from error
