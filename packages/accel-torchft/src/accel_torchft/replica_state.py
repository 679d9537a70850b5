"""What a replica that joins gets from another one: weights, buffers, optimizers, schedulers and the loss scale.

Each process gets the part of the process with its rank in another replica, so tensors that are spread over the
processes of a replica travel as the parts that these hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from accel_plugins.context import Context
from accel_torchft.gradients import local_part

__all__ = ("ReplicaState",)


class ReplicaState:
    """The state of one process, which another process with its rank can take.

    Args:
        context: of the strategy; its precision holds the loss scale.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.models: list[Module] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        """The state; its tensors are the living ones, except for buffers, which forward passes change."""
        return {
            "models": [_tensors_of(model) for model in self.models],
            "optimizers": [_mapped(optimizer.state_dict(), local_part) for optimizer in self.optimizers],
            "schedulers": self.schedules(),
            "precision": self._context.precision.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of another process."""
        for model, tensors in zip(self.models, state["models"], strict=True):
            _take(model, tensors)
        for optimizer, held in zip(self.optimizers, state["optimizers"], strict=True):
            _take_optimizer(optimizer, held)
        self.load_schedules(state["schedulers"])
        if state["precision"]:
            self._context.precision.load_state_dict(state["precision"])

    def schedules(self) -> list[Any]:
        """The state of the schedulers."""
        return [scheduler.state_dict() for scheduler in self.schedulers]

    def load_schedules(self, states: list[Any]) -> None:
        """Take the state of the schedulers of another process."""
        for scheduler, state in zip(self.schedulers, states, strict=True):
            scheduler.load_state_dict(state)

    def forget(self, models: list[Any], optimizers: list[Any]) -> None:
        """Keep nothing of models and optimizers, nor of what schedules these."""
        self.models = [model for model in self.models if not _among(model, models)]
        self.optimizers = [one for one in self.optimizers if not _among(one, optimizers)]
        self.schedulers = [
            scheduler for scheduler in self.schedulers if not _among(getattr(scheduler, "optimizer", None), optimizers)
        ]


def _among(item: Any, items: list[Any]) -> bool:
    return any(item is one or item is getattr(one, "optimizer", None) for one in items)


def _tensors_of(model: Module) -> dict[str, Tensor]:
    parameters = {name: local_part(parameter).detach() for name, parameter in model.named_parameters()}
    return parameters | {name: local_part(buffer).clone() for name, buffer in model.named_buffers()}


def _take(model: Module, tensors: Mapping[str, Tensor]) -> None:
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in own.items():
            local_part(tensor).copy_(tensors[name])


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A nesting of dicts and lists with its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(item, change) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    return value


def _take_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state whose tensors are the local parts of those of spread parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    spread = {
        number: {name: _spread(value, parameters[number]) for name, value in held.items()}
        for number, held in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": spread})


def _spread(value: Any, parameter: Tensor) -> Any:
    """A local part as a tensor that is spread like its parameter; others as they are."""
    if (
        not isinstance(parameter, DTensor)
        or not isinstance(value, Tensor)
        or value.shape != local_part(parameter).shape
    ):
        return value
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
