"""The state that a joining replica receives from another: weights, buffers, optimizers, schedulers and the loss scale.

Each process receives the state of the process with the same rank in another replica, so sharded tensors are sent as
local shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from accel_ops.dtensors import with_shard
from accel_plugins.bundle import Bundle
from accel_plugins.context import Context
from accel_torchft.gradients import local_shard

__all__ = ("ReplicaState", "local_shards", "spread_like_parameters")

T = TypeVar("T")


class ReplicaState:
    """The state of one process, which the process of the same rank in another replica can load.

    Args:
        context: the strategy's context; its precision has the loss scale.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        # Weak references: objects of a deleted Accelerator are not part of the state.
        self._models: list[weakref.ref[Module]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._schedulers: list[weakref.ref[Any]] = []

    def add(self, bundle: Bundle) -> None:
        """Add prepared objects to the state."""
        self._models += map(weakref.ref, bundle.models)
        self._optimizers += (weakref.ref(getattr(one, "optimizer", one)) for one in bundle.optimizers)
        self._schedulers += map(weakref.ref, bundle.schedulers)

    @property
    def models(self) -> list[Module]:
        """The prepared models that still exist."""
        return _living(self._models)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The users' optimizers, unwrapped."""
        return _living(self._optimizers)

    @property
    def schedulers(self) -> list[Any]:
        """The users' schedulers, unwrapped."""
        return _living(self._schedulers)

    @property
    def trained(self) -> list[Tensor]:
        """The parameters of the optimizers, in their order."""
        return [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """The state. Tensors share memory with the objects', except for buffers, which forward passes change."""
        return {
            "models": [_tensors_of(model) for model in self.models],
            "optimizers": [local_shards(optimizer.state_dict()) for optimizer in self.optimizers],
            "schedulers": self.schedules(),
            "precision": self._context.precision.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of another process."""
        for model, tensors in zip(self.models, state["models"], strict=True):
            _take(model, tensors)
        for optimizer, held in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(spread_like_parameters(held, optimizer))
        self.load_schedules(state["schedulers"])
        if state["precision"]:
            self._context.precision.load_state_dict(state["precision"])

    def schedules(self) -> list[Any]:
        """The state of the schedulers."""
        return [scheduler.state_dict() for scheduler in self.schedulers]

    def load_schedules(self, states: list[Any]) -> None:
        """Load the schedulers' state of another process."""
        for scheduler, state in zip(self.schedulers, states, strict=True):
            scheduler.load_state_dict(state)

    def keep_only(self, bundle: Bundle) -> None:
        """Remove all objects except the bundle's optimizers and their models and schedulers."""
        optimizers = [getattr(one, "optimizer", one) for one in bundle.optimizers]
        trained = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
        strangers = [model for model in self.models if not any(id(p) in trained for p in model.parameters())]
        self.forget(strangers, [one for one in self.optimizers if not _among(one, optimizers)])

    def forget(self, models: list[Any], optimizers: list[Any]) -> None:
        """Remove models, optimizers and the schedulers of these optimizers."""
        self._models = [weakref.ref(model) for model in self.models if not _among(model, models)]
        self._optimizers = [weakref.ref(one) for one in self.optimizers if not _among(one, optimizers)]
        self._schedulers = [
            weakref.ref(scheduler)
            for scheduler in self.schedulers
            if not _among(getattr(scheduler, "optimizer", None), optimizers)
        ]


def _living(references: Iterable[weakref.ref[T]]) -> list[T]:
    return [item for reference in references if (item := reference()) is not None]


def _among(item: Any, items: list[Any]) -> bool:
    return any(item is one or item is getattr(one, "optimizer", None) for one in items)


def _tensors_of(model: Module) -> dict[str, Tensor]:
    parameters = {name: local_shard(parameter).detach() for name, parameter in model.named_parameters()}
    return parameters | {name: local_shard(buffer).clone() for name, buffer in model.named_buffers()}


def _take(model: Module, tensors: Mapping[str, Tensor]) -> None:
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in own.items():
            local_shard(tensor).copy_(tensors[name])


def local_shards(value: Any) -> Any:
    """Nested dicts and lists, with each tensor replaced by its local shard."""
    if isinstance(value, Tensor):
        return local_shard(value)
    if isinstance(value, dict):
        return {name: local_shards(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(local_shards(item) for item in value)
    return value


def spread_like_parameters(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """An optimizer's state from local shards: tensors of a sharded parameter become DTensors with its placement."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    spread = {
        number: {name: _spread(value, parameters[number]) for name, value in held.items()}
        for number, held in state["state"].items()
    }
    return {**state, "state": spread}


def _spread(value: Any, parameter: Tensor) -> Any:
    """A local shard as a DTensor with the placement of its parameter; other values unchanged."""
    if (
        not isinstance(parameter, DTensor)
        or not isinstance(value, Tensor)
        or value.shape != local_shard(parameter).shape
    ):
        return value
    return with_shard(parameter, value.to(parameter.device))
