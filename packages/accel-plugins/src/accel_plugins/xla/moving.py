"""Bringing models to XLA devices: parameters are replaced there, and what shared one must share the new one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer

__all__ = ("move", "move_state")


def move(model: Module, device: torch.device) -> Module:
    """A model on the device, its shared parameters shared as before.

    `Module.to` makes new parameters there, one for each place; the caller rebinds what holds the old ones.
    """
    shared = list(_shared(model))
    moved = model.to(device)
    for first, *others in shared:
        parameter = moved.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(moved.get_submodule(owner), attribute, parameter)
    return moved


def _shared(model: Module) -> Iterable[list[str]]:
    """The names of each parameter that has several."""
    names: dict[Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return (every for every in names.values() if len(every) > 1)


def move_state(optimizer: Optimizer) -> None:
    """Bring the state of an optimizer that has stepped to where its parameters are now."""
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())
