"""Functions on weights and modules that this project's packages perform as parts of larger steps."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accel_bigmodel.weight_files.writing import stored_names
from accel_plugins.layers import extract_model_from_parallel
from accelerate.legacy.availability import is_peft_available

if TYPE_CHECKING:
    from torch.nn import Module


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert weights for safetensors: contiguous, and each tied tensor under its first name only."""
    return {name: state_dict[name].contiguous() for name in stored_names(state_dict)}


def model_has_dtensor(model: Module) -> bool:
    """Whether any parameter of a model is a `DTensor`, which is sharded over processes."""
    return any(hasattr(parameter, "placements") for parameter in model.parameters())


def is_peft_model(model: Any) -> bool:
    """Whether a model, wrapped or not, is a `PeftModel`."""
    if not is_peft_available():
        return False
    library: Any = importlib.import_module("peft")
    return isinstance(extract_model_from_parallel(model), library.PeftModel)


def get_model_tp_size(model: Module) -> int | None:
    """The tensor-parallel size that the library that loaded a model set; None if it set none."""
    size: int | None = getattr(model, "tp_size", None)
    return size


def get_module_children_bottom_up(model: Module, return_fqns: bool = False) -> list[Any]:
    """A model's modules and the model itself, each after its children.

    Args:
        model: the model.
        return_fqns: return pairs of name and module.
    """
    modules = list(_bottom_up(model, ""))
    return modules if return_fqns else [module for _, module in modules]


def _bottom_up(module: Module, name: str) -> Iterator[tuple[str, Module]]:
    for own, child in module.named_children():
        yield from _bottom_up(child, f"{name}.{own}" if name else own)
    yield name, module
