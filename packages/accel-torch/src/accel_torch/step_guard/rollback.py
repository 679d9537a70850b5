"""Snapshots of a run in host memory, between two steps, and the way back to the last one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_ops import rng
from accel_plugins.checkpoint.background import Buffers, copy_state
from accel_plugins.checkpoint.state import CheckpointState
from accel_plugins.layers import strategy_model
from accel_plugins.manifest import ObjectKind
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.watch.record import STATUS_RECORD

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from accel_torch.session import Session
    from accel_torch.step_guard.window import ReadBatch

__all__ = ("BufferCopies", "Snapshots")


class Snapshots:
    """The last snapshot of a session. Each process copies what it has, and restores it, without communication.

    Args:
        pinned: use pinned memory, into which devices copy asynchronously.

    Attributes:
        step: number of the last step before the snapshot.
        exists: whether there is one.
    """

    def __init__(self, pinned: bool) -> None:
        self._buffers = Buffers(pinned)
        self._state: Mapping[str, Any] = {}
        self._put_back: list[Callable[[], None]] = []
        self._left_out: list[tuple[Any, int]] = []
        self.step, self._run_step, self.exists = 0, 0, False

    def forget(self) -> None:
        """Forget the snapshot, because another state was loaded."""
        self.exists = False

    def take(self, session: Session, guard: Mapping[str, Any], step: int) -> None:
        """Take a snapshot between two steps, and mark the position of the loaders.

        Args:
            session: the session.
            guard: the state of its guard.
            step: number of the last step.
        """
        prepared, strategy = session.prepared, session.strategy
        taken = {
            "weights": [[*_tensors(session, model)] for model in prepared.all_models],
            "optimizers": [inner_optimizer(one).state_dict() for one in prepared.optimizers],
            "others": [one.state_dict() for one in _stateful(session)],
            "extra": dict(strategy.extra_state(*_trained(session))) if strategy.overrides("extra_state") else {},
            "accumulation": session.accumulation.step,
            "guard": dict(guard),
            "generators": rng.snapshot(),
        }
        self._state = copy_state(CheckpointState(files=taken), self._buffers).files
        self._put_back = [keep_state() for keep_state in session.hooks.keep_state]
        self._left_out.clear()
        for loader in session.gradient.loaders:
            kept = getattr(_iteration(loader), "kept", None)
            if kept is not None:
                kept.mark()
        self._run_step = STATUS_RECORD.run_step
        self.step, self.exists = step, True

    def restore(self, session: Session, bad: Sequence[ReadBatch]) -> Any:
        """Return to the snapshot, and return the state of the guard there.

        Args:
            session: the session.
            bad: batches that the loaders do not yield again.
        """
        state, prepared, strategy = self._state, session.prepared, session.strategy
        self._left_out += [(batch.iteration, batch.number) for batch in bad]
        for loader in session.gradient.loaders:
            iteration = _iteration(loader)
            if iteration is not None:
                iteration.take_back({number for other, number in self._left_out if other is iteration})
        with torch.no_grad():
            for model, saved in zip(prepared.all_models, state["weights"], strict=True):
                for own, kept in zip(_tensors(session, model), saved, strict=True):
                    own.copy_(kept)
        for optimizer, saved in zip(prepared.optimizers, state["optimizers"], strict=True):
            optimizer.optimizer.zero_grad(set_to_none=True)
            # A copy, because the optimizer may go on with the very tensors that it loads.
            inner_optimizer(optimizer).load_state_dict(copy.deepcopy(saved))
        for one, saved in zip(_stateful(session), state["others"], strict=True):
            one.load_state_dict(copy.deepcopy(saved))
        if state["extra"]:
            strategy.load_extra_state(copy.deepcopy(state["extra"]), *_trained(session))
        session.accumulation.step = state["accumulation"]
        for put_back in self._put_back:
            put_back()
        STATUS_RECORD.went_back_to(self._run_step)
        rng.restore(copy.deepcopy(state["generators"]))
        return copy.deepcopy(state["guard"])


class BufferCopies:
    """Copies of the buffers of models from after the last good step: a bad forward pass may have changed them."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []

    def follow(self, session: Session, models: Sequence[Module]) -> None:
        """Keep the buffers of models, too."""
        for model in models:
            added = list(session.strategy.unwrap(strategy_model(model)).buffers())
            self._buffers += added
            self._copies += [buffer.detach().clone() for buffer in added]

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the buffers."""
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)  # pyright: ignore[reportPrivateImportUsage]

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the buffers their values from before the bad step."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)  # pyright: ignore[reportPrivateImportUsage]


def _iteration(loader: Any) -> Any:
    return getattr(getattr(loader, "progress", None), "iteration", None)


def _tensors(session: Session, model: Module) -> list[Tensor]:
    """This process's parts of the parameters and buffers of a model; writing into them changes the model."""
    inner = strategy_model(model)
    if not session.prepared.is_evaluated(model):
        session.strategy.reshard(inner)
        inner = session.strategy.unwrap(inner)
    return [
        tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
        for tensor in (*inner.parameters(), *inner.buffers())
    ]


def _stateful(session: Session) -> list[Any]:
    """Schedulers, the loss scale and registered objects."""
    prepared = session.prepared
    scaler = [prepared.scaler] if prepared.scaler is not None else []
    return [*prepared.schedulers, *scaler, *prepared.custom]


def _trained(session: Session) -> tuple[list[Any], list[Any]]:
    prepared = session.prepared
    return prepared.for_strategy(ObjectKind.MODEL), prepared.for_strategy(ObjectKind.OPTIMIZER)
