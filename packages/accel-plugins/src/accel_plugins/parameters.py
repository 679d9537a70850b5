"""Identify parameters: by their names in the user's model, their ties, and their optimizers.

Strategies replace parameters, wrappers rename them, and checkpoints of different backends name them differently. Only
the name in the user's model never changes. The state of an optimizer lists parameters by position, as torch does, or by
name, as sharding backends do. This module converts both, so that either kind of backend loads checkpoints of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from accel_bigmodel.tensors import canonical_name, find_tied_parameters, preserved_ties
from accel_state.errors import CheckpointError

__all__ = (
    "by_name",
    "by_position",
    "canonical_name",
    "find_tied_parameters",
    "names_by_group",
    "names_parameters",
    "parameter_names",
    "preserved_ties",
    "rebind",
    "restart",
    "unstepped",
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
    """Replace old parameters by new ones in optimizers; the optimizer state moves to the new ones.

    Args:
        optimizers: the optimizers; changed in place.
        mapping: the new parameter for each old one.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [mapping.get(parameter, parameter) for parameter in group["params"]]
        for old, new in mapping.items():
            if old in optimizer.state:
                optimizer.state[new] = _following(optimizer.state.pop(old), new)


def _following(state: dict[str, Any], parameter: Parameter) -> dict[str, Any]:
    """The state of a parameter, sharded if the parameter is."""
    if not hasattr(parameter, "device_mesh"):
        return state
    # Whoever shards parameters has imported the module of DTensor.
    from accel_plugins.sharded_optimizers import shard_state

    return shard_state(state, parameter)


def with_tied_names(model: Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Add all names of tied weights; a safetensors file has one name of each."""
    complete = dict(weights)
    for names in find_tied_parameters(model):
        weight = next((weights[name] for name in names if name in weights), None)
        if weight is not None:
            complete.update({name: weight for name in names if name not in weights})
    return complete


# ---------------------------------------------------------------------- states of optimizers


def names_parameters(state: Mapping[str, Any]) -> bool:
    """Whether the state of an optimizer lists parameters by name."""
    return any(isinstance(name, str) for group in state["param_groups"] for name in group["params"])


def by_position(state: Mapping[str, Any], optimizer: Optimizer, models: Iterable[Module]) -> dict[str, Any]:
    """Convert a state by name to one by position, as the optimizer itself would save it.

    Args:
        state: the state by name.
        optimizer: the optimizer that loads it.
        models: prepared models; one of them has the optimizer's parameters.

    Raises:
        CheckpointError: the state belongs to other parameters.
    """
    names = _names(optimizer, models)
    positions = {name: position for position, name in enumerate(name for group in names for name in group)}
    saved = {name: group for group in state["param_groups"] for name in group["params"]}
    missing = [name for name in positions if name not in saved]
    if missing or len(saved) != len(positions):
        raise _other_parameters(optimizer, missing[:3] or [f"{len(saved)} parameters"])
    groups = [
        {**_in_kind(saved[group[0]], own), "params": [positions[name] for name in group]}
        for group, own in zip(names, optimizer.param_groups, strict=True)
    ]
    by_position = {positions[name]: value for name, value in state["state"].items() if name in positions}
    return {"state": dict(sorted(by_position.items())), "param_groups": groups}


def unstepped(optimizer: Optimizer, models: Iterable[Module]) -> dict[str, Any]:
    """The state by name of an optimizer that has not stepped yet."""
    names = _names(optimizer, models)
    groups = [{**group, "params": own} for group, own in zip(optimizer.param_groups, names, strict=True)]
    return {"state": {}, "param_groups": groups}


def restart(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the state of an optimizer that had not stepped: set the groups' options and drop the current state."""
    optimizer.state.clear()
    for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        options = {name: value for name, value in saved.items() if name != "params"}
        own.update(_in_kind(options, own))


def _in_kind(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a group, with tuples instead of the lists that sharded checkpoints contain."""
    return {
        name: tuple(value) if isinstance(value, list) and isinstance(own.get(name), tuple) else value
        for name, value in saved.items()
    }


def by_name(state: Mapping[str, Any], optimizer: Optimizer, models: Iterable[Module]) -> dict[str, Any]:
    """Convert a state by position to one by name; see `by_position`."""
    names = _names(optimizer, models)
    flat = [name for group in names for name in group]
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if sizes != [len(group) for group in names]:
        raise _other_parameters(optimizer, [f"groups of {sizes} parameters"])
    # Positions count through the groups in order, whatever the numbers in the state.
    positions = [position for group in state["param_groups"] for position in group["params"]]
    named = dict(zip(positions, flat, strict=True))
    groups = [{**group, "params": own} for group, own in zip(state["param_groups"], names, strict=True)]
    return {"state": {named[position]: value for position, value in state["state"].items()}, "param_groups": groups}


def _names(optimizer: Optimizer, models: Iterable[Module]) -> list[list[str]]:
    """The names of the optimizer's parameters, by group."""
    names = names_by_group(optimizer, models)
    if names is None:
        raise _other_parameters(optimizer, ["parameters of several models, or of no prepared model"])
    return names


def _other_parameters(optimizer: Optimizer, names: list[str]) -> CheckpointError:
    return CheckpointError(
        f"Cannot load the state of {type(optimizer).__name__} from the checkpoint of another backend.",
        f"The optimizer and the checkpoint have different parameters: {', '.join(names)}.",
        "Prepare the same models and optimizers as when it was saved.",
    )
