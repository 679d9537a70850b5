"""Replicas that train independently and synchronise every few steps: LocalSGD and DiLoCo, with the classes of torchft.

A round is `sync_every` optimizer steps of each replica. The replicas agree on its members before its first samples are
drawn, and torchft synchronises weights at its end. If a member is lost, the round counts on no replica: the others
restore the weights from its beginning and repeat its samples.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module, ParameterList
from torch.optim import SGD, Optimizer
from torchft.local_sgd import DiLoCo, LocalSGD

from accel_plugins import Bundle, Context
from accel_plugins.fsdp.fsdp2 import FSDP2Strategy
from accel_state.errors import NotReady
from accel_torchft.elastic import StepMembers
from accel_torchft.gradients import local_shard
from accel_torchft.quorum import Quorum, QuorumMembers
from accel_torchft.replica_state import local_shards, spread_like_parameters
from accel_torchft.strategy import OneProcess, Replicated, refuse_closure

if TYPE_CHECKING:
    from accel_plugins.precision.base import Closure

__all__ = (
    "DiLoCoFSDP2Strategy",
    "DiLoCoStrategy",
    "LocalSGDFSDP2Strategy",
    "LocalSGDStrategy",
    "LocalSteps",
)

_STATE_FIELDS = ("local_steps", "members", "outer_optimizer", "round")


class LocalSteps(Replicated):
    """Common base of LocalSGD and DiLoCo; precedes the strategy inside a replica in the list of bases."""

    def __init__(self, context: Context, config: Any) -> None:
        super().__init__(context, config)
        self._engine: LocalSGD | DiLoCo | None = None
        self._local = 0
        """Number of steps made in this round."""
        self._who: list[int] = []
        """Number of members of the round, and this replica's index among them."""
        self._schedule: dict[str, Any] = {}
        """States of schedulers, and options of the optimizers, at the beginning of the round."""
        self._resumed: Mapping[str, Any] = {}

    @abstractmethod
    def _exchange_by(self, quorum: Quorum, trained: ParameterList, optimizer: Optimizer) -> LocalSGD | DiLoCo:
        """Create the torchft object that synchronises weights; it hooks into the optimizer's steps."""

    @abstractmethod
    def _begin_round(self) -> None:
        """Copy the weights with which all members begin the round."""

    @abstractmethod
    def _weights_of_round(self) -> Sequence[Tensor]:
        """The weights at the beginning of the round: the local shard of each trained parameter, in order."""

    def _take_weights_of_round(self, weights: Sequence[Tensor]) -> None:
        """Set the weights at the beginning of the round to those of a checkpoint."""
        for kept, weight in zip(self._weights_of_round(), weights, strict=True):
            kept.copy_(weight)

    def setup(self, bundle: Bundle) -> Bundle:
        bundle = super().setup(bundle)
        if self._engine is not None and bundle.optimizers:
            # From now on another Accelerator of this process trains.
            self._leave()
            self._state.keep_only(bundle)
        return bundle

    # ------------------------------------------------------------------ rounds

    def begin_step(self) -> StepMembers:
        members = super().begin_step()
        return dataclasses.replace(members, number=members.number * self.replicas.sync_every + self._local)

    def _open(self) -> Quorum:
        quorum = Quorum(
            self.context.process,
            self.replicas,
            self._state_of_round,
            self._take_state,
            self._first_step,
            self.replicas.sync_every,
        )
        optimizer = self._inner_optimizer()
        self._engine = self._exchange_by(quorum, ParameterList(self._state.trained), optimizer)
        self._engine.__enter__()
        self._begin_round()
        self._resume(self._resumed)
        return quorum

    def _inner_optimizer(self) -> Optimizer:
        for optimizer in self._state.optimizers:
            return optimizer
        raise NotReady(
            "Cannot begin a round of local steps (accel-torchft).",
            "No optimizer is prepared, and replicas synchronise the weights that an optimizer trains.",
            "Give the optimizer to accelerator.prepare() before the loop.",
        )

    def _begin(self) -> QuorumMembers:
        if self._members is not None:
            return super()._begin()
        members = super()._begin()
        who = [members.count, members.index]
        if self._local and who != self._who:
            # Before the checkpoint other members shared the samples of this round.
            self._rewind()
        self._resumed, self._who = {}, who
        if not self._local:
            self._begin_round()
            self._schedule = self._current_schedule()
        return members

    def _renew_buckets(self) -> None:
        """Do nothing, because gradients are not sent to other replicas."""

    def finalize_gradients(self, optimizer: Optimizer) -> None:
        super(Replicated, self).finalize_gradients(optimizer)
        if self._members is None:
            # A loop that does not read a prepared loader begins its rounds here.
            self._begin()

    def step(self, optimizer: Optimizer, closure: Closure | None = None) -> bool:
        refuse_closure(closure)
        self.finalize_gradients(optimizer)
        quorum = self._quorum
        assert quorum is not None
        rounds = quorum.step
        if not super(Replicated, self).step(optimizer):
            return False
        quorum.note_joined()
        self._healed_schedules = None
        self._local += 1
        if self._local < self.replicas.sync_every:
            return True
        self._local, self._members = 0, None
        if quorum.step == rounds:
            self._rewind()
            return False
        return True

    def _current_schedule(self) -> dict[str, Any]:
        """The schedulers' states, and the optimizer options that they change."""
        options = [
            {name: value for name, value in group.items() if name != "params"}
            for optimizer in self._state.optimizers
            for group in optimizer.param_groups
        ]
        return copy.deepcopy({"schedulers": self._state.schedules(), "options": options})

    def _rewind(self) -> None:
        """Restore the weights from the beginning of the round, but not the state of the inner optimizer."""
        self._local = 0
        if self._engine is not None:
            self._engine._local_step = 0
        _copy(self._weights_of_round(), self._state.trained)
        schedule = copy.deepcopy(self._schedule)
        self._state.load_schedules(schedule["schedulers"])
        groups = (group for optimizer in self._state.optimizers for group in optimizer.param_groups)
        for group, options in zip(groups, schedule["options"], strict=True):
            group.update(options)

    # ------------------------------------------------------------------ state for other replicas

    def _state_of_round(self) -> dict[str, Any]:
        """The state at the beginning of the round, for a replica that joins: training continues while it is sent."""
        state = self._state.state_dict()
        kept = dict(zip(map(_place, self._state.trained), self._weights_of_round(), strict=True))
        state["models"] = [
            {name: kept.get(_place(tensor), tensor) for name, tensor in tensors.items()} for tensors in state["models"]
        ]
        return {**state, "optimizers": copy.deepcopy(state["optimizers"])}

    def _take_state(self, state: dict[str, Any]) -> None:
        super()._take_state(state)
        self._local = 0
        if self._engine is not None:
            self._engine._local_step = 0

    @contextmanager
    def global_weights(self, model: Module) -> Iterator[None]:
        """A context in which the model has the weights of the last synchronisation, which are equal on all replicas."""
        trained = self._state.trained if self._local else []
        own = [local_shard(parameter).detach().clone() for parameter in trained]
        if trained:
            _copy(self._weights_of_round(), trained)
        try:
            yield
        finally:
            _copy(own, trained)

    # ------------------------------------------------------------------ checkpoints

    def extra_state(self, models: Sequence[Module], optimizers: Sequence[Any]) -> Mapping[str, Any]:
        if self._engine is None and self._resumed:
            return {**super().extra_state(models, optimizers), **self._resumed}
        weights = [weight.clone() for weight in self._weights_of_round()] if self._local else []
        return {
            **super().extra_state(models, optimizers),
            "local_steps": self._local,
            "members": self._who if self._local else [],
            "outer_optimizer": self._outer_state(),
            "round": {"weights": weights, **self._schedule} if self._local else {},
        }

    def load_extra_state(self, state: Mapping[str, Any], models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        inherited = {name: value for name, value in state.items() if name not in _STATE_FIELDS}
        super().load_extra_state(inherited, models, optimizers)
        self._resumed = {name: state[name] for name in _STATE_FIELDS}
        self._members = None
        if self._engine is not None:
            self._begin_round()
            self._resume(self._resumed)

    def _resume(self, state: Mapping[str, Any]) -> None:
        """Continue the round in which a checkpoint was saved."""
        assert self._engine is not None
        self._local = self._engine._local_step = state.get("local_steps", 0)
        if self._local:
            kept, self._who = state["round"], list(state["members"])
            self._take_weights_of_round(kept["weights"])
            self._schedule = {"schedulers": kept["schedulers"], "options": kept["options"]}
        if state.get("outer_optimizer"):
            self._load_outer_state(state["outer_optimizer"])

    def _outer_state(self) -> dict[str, Any]:
        return {}

    def _load_outer_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `_outer_state` returned."""

    # ------------------------------------------------------------------ the end

    def release(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        super().release(models, optimizers)
        if self._engine is not None and not self._state.optimizers:
            self._leave()

    def _leave(self) -> None:
        """Leave the quorum, so that torchft's manager drops its references to models and optimizers."""
        if self._engine is not None:
            self._engine.__exit__(None, None, None)
        self._engine, self._local, self._members = None, 0, None
        if self._quorum is not None:
            self._first_step = self._quorum.step
            self._quorum.close()
            self._quorum = None

    def close(self) -> None:
        if self._engine is not None:
            self._engine.__exit__(None, None, None)
        self._members = None
        super().close()


def _place(tensor: Tensor) -> tuple[int, torch.Size]:
    """Memory address and shape of a tensor's local shard."""
    part = local_shard(tensor)
    return part.data_ptr(), part.shape


@torch.no_grad()
def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        local_shard(target).copy_(source)


class Averaging(LocalSteps):
    """LocalSGD: a round ends with the mean of the weights."""

    _kept: Sequence[Tensor] = ()

    def _exchange_by(self, quorum: Quorum, trained: ParameterList, optimizer: Optimizer) -> LocalSGD | DiLoCo:
        return LocalSGD(quorum.manager, trained, optimizer, self.replicas.sync_every)

    def _begin_round(self) -> None:
        self._kept = [local_shard(parameter).detach().to("cpu", copy=True) for parameter in self._state.trained]

    def _weights_of_round(self) -> Sequence[Tensor]:
        return self._kept


class OuterSGD(SGD):
    """The outer optimizer; its state is sent as local shards."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = local_shards(super().state_dict())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(spread_like_parameters(state_dict, self))


class Outer(LocalSteps):
    """DiLoCo: a round ends with a step of an outer optimizer on the mean of the members' weight changes."""

    _outer: OuterSGD

    def _exchange_by(self, quorum: Quorum, trained: ParameterList, optimizer: Optimizer) -> LocalSGD | DiLoCo:
        replicas = self.replicas
        momentum = replicas.outer_momentum
        self._outer = OuterSGD(trained.parameters(), replicas.outer_lr, momentum, nesterov=momentum > 0)
        return DiLoCo(quorum.manager, [trained], optimizer, self._outer, replicas.sync_every)

    def _begin_round(self) -> None:
        self._fragment.save_parameters()

    def _weights_of_round(self) -> Sequence[Tensor]:
        return list(self._fragment.original_parameters.values())

    @property
    def _fragment(self) -> Any:
        assert isinstance(self._engine, DiLoCo)
        return self._engine._fragments[0]

    def _outer_state(self) -> dict[str, Any]:
        return {} if self._engine is None else self._outer.state_dict()

    def _load_outer_state(self, state: dict[str, Any]) -> None:
        self._outer.load_state_dict(state)


class LocalSGDStrategy(Averaging, OneProcess):
    """LocalSGD with replicas of one process each, with the whole model."""


class LocalSGDFSDP2Strategy(Averaging, FSDP2Strategy):
    """LocalSGD with replicas of several processes, which shard the model with FSDP 2."""


class DiLoCoStrategy(Outer, OneProcess):
    """DiLoCo with replicas of one process each, with the whole model."""


class DiLoCoFSDP2Strategy(Outer, FSDP2Strategy):
    """DiLoCo with replicas of several processes, which shard the model with FSDP 2."""
