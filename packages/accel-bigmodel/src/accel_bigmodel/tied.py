"""Finds tied tensors (one tensor with several names), and ties them again after weights were replaced."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

__all__ = (
    "canonical_name",
    "find_tied_parameters",
    "id_tensor_storage",
    "memory_of",
    "preserved_ties",
    "retie_parameters",
    "tied_names",
)

_log = logging.getLogger(__name__)

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
