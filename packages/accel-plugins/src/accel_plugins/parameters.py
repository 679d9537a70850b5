"""Which parameter is which: its name in the user's model, its ties, and the optimizers that hold it.

Strategies replace parameters, wrappers rename them, and checkpoints of different backends name them differently. What
stays the same is the name in the user's model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from accel_bigmodel.tied import canonical_name, find_tied_parameters, preserved_ties

__all__ = (
    "canonical_name",
    "find_tied_parameters",
    "names_by_group",
    "parameter_names",
    "preserved_ties",
    "rebind",
    "with_tied_names",
)


def parameter_names(model: Module) -> dict[Parameter, str]:
    """The name of each parameter in the user's model, without the segments that wrappers add."""
    return {parameter: canonical_name(name) for name, parameter in model.named_parameters()}


def names_by_group(optimizer: Optimizer, models: Iterable[Module]) -> list[list[str]] | None:
    """The names of an optimizer's parameters, by group; None where no model has all of them."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    for model in models:
        names = parameter_names(model)
        if all(parameter in names for group in groups for parameter in group):
            return [[names[parameter] for parameter in group] for group in groups]
    return None


def rebind(optimizers: Iterable[Optimizer], mapping: Mapping[Parameter, Parameter]) -> None:
    """Make optimizers hold new parameters instead of the old ones; their state moves with the parameters.

    Args:
        optimizers: they change in place.
        mapping: by old parameter, the new one.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [mapping.get(parameter, parameter) for parameter in group["params"]]
        for old, new in mapping.items():
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)


def with_tied_names(model: Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Weights under all names of those that have several, as a safetensors file keeps one name of each."""
    found = dict(weights)
    for names in find_tied_parameters(model):
        given = next((weights[name] for name in names if name in weights), None)
        if given is not None:
            found.update({name: given for name in names if name not in weights})
    return found
