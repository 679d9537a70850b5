"""The tensor that a module holds in place of an offloaded weight: computing with it, or changing it, raises an error.

torch computes some operations of a tensor with data and a tensor on the meta device from uninitialised memory, without
an error. A placeholder is on the meta device and answers questions such as its shape, but does not take part in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from accel_state.errors import NotOffered

__all__ = ("Placeholder", "refuse_weights_without_data")

_NEEDS_DATA: Final = "item"
"""An operation for which torch raises an error of its own for tensors on the meta device."""
_CHANGES_NO_DATA: Final = frozenset({"requires_grad_", "detach_", "rename_"})


class Placeholder(Tensor):
    """An offloaded weight between forwards: a tensor on the meta device, and a parameter if the weight is one.

    Operations on placeholders alone return placeholders. An operation with a tensor that has data, a copy to another
    device, and an operation in place raise `NotOffered`, which names the weight.

    Attributes:
        weight_name: full name of the weight.
    """

    weight_name: str
    _is_param: bool

    @staticmethod
    def of(tensor: Tensor, name: str) -> Placeholder:
        """The placeholder of a weight: same shape, dtype and `requires_grad`."""
        with torch._C.DisableTorchFunctionSubclass():
            # `empty_like` of a meta tensor runs Python, which imports hundreds of modules at its first call.
            data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            return _placeholder(data, name, tensor.requires_grad, isinstance(tensor, nn.Parameter))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            operation: str = getattr(func, "__name__", str(func))
            tensors = list(_tensors_in((args, kwargs)))
            name = next(tensor.weight_name for tensor in tensors if isinstance(tensor, Placeholder))
            with_data = operation != "__get__" and not all(tensor.is_meta for tensor in tensors)
            if with_data or operation == _NEEDS_DATA:
                raise _unreadable(name)
            in_place = operation.endswith("_") and not operation.endswith("__")
            if in_place and operation not in _CHANGES_NO_DATA and isinstance(tensors[0], Placeholder):
                raise NotOffered(
                    f"Cannot change the offloaded weight {name!r}.",
                    "A model cannot train, or get other weights, while they are offloaded: they would stay as they "
                    "are.",
                    "Remove the hooks first: remove_hook_from_submodules(model).",
                )
            try:
                result = func(*args, **kwargs)
            except NotImplementedError as error:
                raise _unreadable(name) from error
            return _named(result, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        if id(self) not in memo:
            memo[id(self)] = Placeholder.of(self, self.weight_name)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _restored, (tuple(self.shape), self.dtype, self.weight_name, self.requires_grad, self._is_param)


def _placeholder(data: Tensor, name: str, requires_grad: bool = False, is_parameter: bool = False) -> Placeholder:
    placeholder: Placeholder = Tensor._make_subclass(Placeholder, data, requires_grad)
    placeholder.weight_name = name
    # By this attribute, torch recognises a parameter that has another class.
    placeholder._is_param = is_parameter
    return placeholder


def _restored(
    shape: tuple[int, ...], dtype: torch.dtype, name: str, requires_grad: bool, is_parameter: bool
) -> Placeholder:
    return _placeholder(torch.empty(shape, dtype=dtype, device="meta"), name, requires_grad, is_parameter)


def _unreadable(name: str) -> NotOffered:
    return NotOffered(
        f"Cannot compute with the offloaded weight {name!r}: it is not loaded.",
        "It is loaded only during the forward of the module that owns it.",
        "Call that module, or read the weight inside of align_module_device(module). If another module reads it, name "
        "the class of that module in preload_module_classes when you offload the model. To train the model, remove the "
        "hooks first: remove_hook_from_submodules(model).",
    )


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)


def _named(result: Any, name: str) -> Any:
    """The result of an operation, with placeholders in place of tensors on the meta device."""
    if type(result) is Tensor and result.is_meta:
        return _placeholder(result, name, result.requires_grad)
    if type(result) in (list, tuple):
        return type(result)(_named(item, name) for item in result)
    return result


def refuse_weights_without_data(model: nn.Module, loaded_by_hooks: Callable[[nn.Module], Iterable[Tensor]]) -> None:
    """Check that every weight of a model has data, or is one that a hook loads.

    Args:
        model: the model.
        loaded_by_hooks: the placeholders that the hook of a module replaces during its forward.

    Raises:
        NotOffered: a weight is on the meta device and nothing loads it.
    """
    waiting, without_data = [("", model)], dict[str, Tensor]()
    while waiting:
        prefix, module = waiting.pop()
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                # The type first: asking a placeholder for its device takes longer.
                if tensor is not None and type(tensor) is not Placeholder and tensor.is_meta:
                    without_data[prefix + name] = tensor
        waiting += ((f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None)
    if not without_data:
        return
    loaded = {id(tensor) for module in model.modules() for tensor in loaded_by_hooks(module)}
    empty = [name for name, tensor in without_data.items() if id(tensor) not in loaded]
    if empty:
        raise NotOffered(
            f"Cannot compute with {type(model).__name__}: {empty[0]!r} is on the meta device and has no data.",
            "No hook loads it. A part that was added after offloading is not offloaded, and the device of an offloaded "
            "weight is meta.",
            "Build the part on the device where the model computes, or add it before you offload the model.",
        )
