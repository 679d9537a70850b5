"""Functions on weights and modules that this project's packages perform as parts of larger steps."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accel_bigmodel.weight_files.writing import stored_names
from accel_ops import recursively_apply
from accel_plugins.layers import extract_model_from_parallel
from accelerate.legacy.availability import is_peft_available

if TYPE_CHECKING:
    import torch
    from torch.nn import Module
    from torch.optim import Optimizer

__all__ = (
    "TORCH_SAFE_GLOBALS",
    "clean_state_dict_for_safetensors",
    "get_model_tp_size",
    "get_module_children_bottom_up",
    "is_peft_model",
    "model_has_dtensor",
    "move_to_device",
    "patch_optimizer_step",
    "safe_globals",
)


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
    found = list(_bottom_up(model, ""))
    return found if return_fqns else [module for _, module in found]


def _bottom_up(module: Module, name: str) -> Iterator[tuple[str, Module]]:
    for own, child in module.named_children():
        yield from _bottom_up(child, f"{name}.{own}" if name else own)
    yield name, module


def move_to_device(state: Any, device: torch.device | str) -> Any:
    """Move an optimizer's nested state to a device."""
    return recursively_apply(lambda tensor: tensor.to(device), state)


def patch_optimizer_step(accelerated_optimizer: Optimizer, method: Any) -> Any:
    """Wrap a step so that a prepared optimizer records the call.

    Args:
        accelerated_optimizer: a prepared optimizer; a call sets its attribute `_accelerate_step_called`.
        method: the step to wrap.
    """

    def patched_step(*args: Any, **kwargs: Any) -> Any:
        accelerated_optimizer._accelerate_step_called = True  # type: ignore[attr-defined] # noqa: SLF001 - its name
        return method(*args, **kwargs)

    return patched_step


def safe_globals() -> list[Any]:
    """Objects that torch's safe loading must allow for the generator states of old checkpoints; empty without numpy."""
    try:
        from _codecs import encode

        import numpy
        from numpy.random import get_state
    except ImportError:
        return []
    state: Any = get_state(legacy=True)
    rebuild = state[1].__reduce__()[0]
    return [rebuild, numpy.ndarray, encode, numpy.dtype, type(numpy.dtype(numpy.uint32))]


TORCH_SAFE_GLOBALS = safe_globals()
