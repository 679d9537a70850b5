"""The tensors of a module by name: finds them, moves or replaces one, and keeps the names of tied ones together."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from accel_bigmodel.device_map import Device, resolve_device
from accel_bigmodel.sizes import torch_dtype
from accel_state.devices.select import family_of
from accel_state.errors import SettingError, ShapeMismatch

__all__ = (
    "TiedParameters",
    "canonical_name",
    "find_tied_parameters",
    "get_non_persistent_buffers",
    "holds_sharded_weights",
    "id_tensor_storage",
    "memory_of",
    "named_module_tensors",
    "parameter_like",
    "preserved_ties",
    "retie_parameters",
    "set_module_tensor_to_device",
    "submodule_and_leaf",
    "tensors_of",
    "tied_names",
)

TiedParameters: TypeAlias = "MutableMapping[int, MutableMapping[torch.device, Tensor]]"
"""Address of a tied weight to its copies by device, so that all its names share one copy."""

_WRAPPER_SEGMENTS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Names of torch's wrapper modules."""


def canonical_name(name: str) -> str:
    """The name of a parameter in the user's model and in files, without the segments that wrappers of torch add.

    Example:
        >>> canonical_name("layers.0._orig_mod.weight")
        'layers.0.weight'
    """
    if not any(segment in name for segment in _WRAPPER_SEGMENTS):
        return name
    return ".".join(segment for segment in name.split(".") if segment not in _WRAPPER_SEGMENTS)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model by full name, with every name of a tied tensor."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return dict(named)


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, of a module, each with its name.

    Args:
        module: the module.
        include_buffers: whether buffers follow the parameters.
        recurse: whether to include those of its submodules.
        remove_non_persistent: omit the buffers that a state dict omits.
    """
    # torch's own iterators take several times as long for a single module.
    yield from module.named_parameters() if recurse else _not_none(module._parameters)
    if include_buffers:
        skipped = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else ()
        for name, buffer in module.named_buffers() if recurse else _not_none(module._buffers):
            if name not in skipped:
                yield name, buffer


def _not_none(tensors: Mapping[str, Tensor | None]) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in tensors.items() if tensor is not None]


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of the buffers that a state dict omits.

    Args:
        module: the module.
        recurse: whether to include those of its submodules.
        fqns: return names relative to `module`, such as "block.0.mask", instead of only the last part.
    """
    modules = module.named_modules(remove_duplicate=False) if recurse else [("", module)]
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, owner in modules
        for name in owner._non_persistent_buffers_set
    }


def holds_sharded_weights(model: nn.Module) -> bool:
    """Whether weights of the model are sharded over processes by torch, as FSDP2 and tensor parallelism do."""
    # Code that shards weights has imported this module; importing it only for this check takes a third of a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(parameter, module.DTensor) for parameter in model.parameters())


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


def id_tensor_storage(tensor: Tensor) -> tuple[Any, int, int]:
    """Device, address and size in bytes of the storage under a tensor: equal for all views of one storage.

    Tensors without an address (meta, empty, subclasses that hide it) are identified by their object.
    """
    try:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):
        address, size = 0, 0
    return tensor.device, address or id(tensor), size


def memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """The identity of a tensor: storage, offset, shape, strides and dtype."""
    if tensor.layout != torch.strided:
        return (id(tensor),)
    return (*id_tensor_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def tied_names(state_dict: Mapping[str, Any]) -> list[list[str]]:
    """Groups of two or more names of the same tensor in a state dict, in the order of the state dict.

    Takes time linear in the number of names. Views of different parts of one storage are not tied.
    """
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, tensor in state_dict.items():
        if isinstance(tensor, Tensor):
            groups.setdefault(memory_of(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Groups of names of the same parameter in a model, each sorted.

    Args:
        model: the model, which may be on the meta device: parameters are compared as objects.
        kwargs: accepted without effect.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model[1].weight = model[0].weight
        >>> find_tied_parameters(model)
        [['0.weight', '1.weight']]
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Tie the names of each group to one parameter again: the first of them with data, else the first.

    Args:
        model: the model.
        tied_params: groups of names, as `find_tied_parameters` returns them; names that no longer exist are ignored.
    """
    for names in tied_params:
        owners = [(_owner(model, name), name.rpartition(".")[2]) for name in names]
        present = [(owner, leaf) for owner, leaf in owners if owner is not None and leaf in owner._parameters]
        parameters = [parameter for owner, leaf in present if (parameter := owner._parameters[leaf]) is not None]
        if parameters:
            chosen = next((parameter for parameter in parameters if not parameter.is_meta), parameters[0])
            for owner, leaf in present:
                owner._parameters[leaf] = chosen


@contextmanager
def preserved_ties(model: nn.Module) -> Iterator[None]:
    """Tie the parameters of a model again after a block that replaces them one by one."""
    tied = find_tied_parameters(model)
    yield
    retie_parameters(model, tied)


def _owner(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return None
