"""Snapshots of a run in host memory, between two steps, and the way back to the last one."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accel_ops import rng
from accel_plugins.checkpoint.background import Buffers, copy_state
from accel_plugins.checkpoint.state import CheckpointState
from accel_plugins.layers import strategy_model
from accel_plugins.manifest import ObjectKind
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state.errors import NotReady
from accel_state.watch.record import STATUS_RECORD
from accel_torch.hooks import Hook

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from accel_torch.session import Session
    from accel_torch.step_guard.history import StepHistory
    from accel_torch.step_guard.window import ReadBatch, Window

__all__ = ("Rollback",)


class Rollback(Hook):
    """Takes snapshots between two batches, and returns to the last one after a bad step.

    Args:
        session: the session; weakly referenced.
        every: good steps between two snapshots.
        histories: those of the optimizers, which go back too.
        window: the window of the current step.

    Attributes:
        has_stepped: whether a step was judged since the last batch.
        goes_back: whether the run returns to the snapshot before the next batch; until then no step is made.
    """

    def __init__(self, session: Session, every: int, histories: Sequence[StepHistory], window: Window) -> None:
        self._session, self._every, self._histories, self._window = weakref.ref(session), every, histories, window
        self._buffers = Buffers(session.process.family.spec.pins_memory)
        self._training: weakref.WeakSet[Any] = weakref.WeakSet()
        self.has_stepped = self.goes_back = False
        self._bad: list[tuple[Any, int]] = []
        self._step: int | None = None
        self._good = self._run_step = 0
        self._state: Mapping[str, Any] = {}
        self._put_back: list[Callable[[], None]] = []

    # ------------------------------------------------------------------ when

    def loader_prepared(self, session: Session, loader: Any) -> None:
        """Let a loader keep its batches, so that it can yield them again."""
        loader.keeps_batches = True

    def go_back(self, bad: Sequence[ReadBatch]) -> int:
        """Return to the snapshot before the next batch; returns the number of the last step before it.

        Args:
            bad: batches that the loaders do not yield again.

        Raises:
            NotReady: no snapshot was made.
        """
        if self._step is None:
            raise NotReady(
                "Cannot return to a snapshot after a bad step.",
                "There is none: snapshots are taken between two batches of a prepared DataLoader, and none was read.",
                "Prepare the DataLoader of the training loop, or use 'skip'.",
            )
        self.goes_back = True
        self._bad += [(batch.iteration, batch.number) for batch in bad]
        return self._step

    def forget(self) -> None:
        """Forget the snapshot, because it is not of this run any more."""
        self._step, self.goes_back = None, False

    def before_boundary(self, loader: Any, first: bool) -> None:
        """Return to the snapshot after a bad step."""
        session = self._session()
        if self.goes_back and session is not None and not first:
            self.goes_back = False
            self._restore(session)
            self._window.has_ended = True

    def after_boundary(self, loader: Any, first: bool) -> None:
        """Take a snapshot, if it is due: before the first step, when an epoch begins, and every few good steps."""
        session = self._session()
        if session is None:
            return
        has_stepped, self.has_stepped = self.has_stepped, False
        good = max((history.good for history in self._histories), default=0)
        if first:
            due = loader in self._training or len(session.gradient.loaders) == 1
            due = due and any(model.training for model in session.prepared.models)
            # What a script did between two epochs cannot be repeated.
            self.goes_back = self.goes_back and not due
        else:
            if has_stepped:
                self._training.add(loader)
            due = has_stepped and session.gradient.sync_gradients and good - self._good >= self._every
        if due or (has_stepped and self._step is None):
            self._good = good
            self._take(session)

    # ------------------------------------------------------------------ what

    def _take(self, session: Session) -> None:
        """Copy the state of this process, and mark the position of the loaders; nothing is sent."""
        models = session.prepared.all_models
        state = {
            "weights": [_tensors(session, model) for model in models],
            "states": [one.state_dict() for one in self._stateful(session)],
            "extra": dict(session.strategy.extra_state(*_trained(session))),
            "accumulation": session.accumulation.step,
            "generators": rng.snapshot(),
        }
        self._state = copy_state(CheckpointState(files=state), self._buffers).files
        self._put_back = [keep_state() for keep_state in session.hooks.keep_state]
        self._bad.clear()
        for loader in session.gradient.loaders:
            kept = getattr(_iteration(loader), "kept", None)
            if kept is not None:
                kept.mark()
        self._run_step = STATUS_RECORD.run_step
        self._step = max((history.steps for history in self._histories), default=0)

    def _restore(self, session: Session) -> None:
        """Return to the snapshot. Copies are loaded, because an object may go on with the very tensors it loads."""
        prepared, state = session.prepared, self._state
        for loader in session.gradient.loaders:
            iteration = _iteration(loader)
            if iteration is not None:
                iteration.take_back({number for other, number in self._bad if other is iteration})
        with torch.no_grad():
            for model, saved in zip(prepared.all_models, state["weights"], strict=True):
                for tensor, kept in zip(_tensors(session, model), saved, strict=True):
                    tensor.copy_(kept)
        for optimizer in prepared.optimizers:
            optimizer.optimizer.zero_grad(set_to_none=True)
        for one, saved in zip(self._stateful(session), state["states"], strict=True):
            one.load_state_dict(copy.deepcopy(saved))
        if state["extra"]:
            session.strategy.load_extra_state(copy.deepcopy(state["extra"]), *_trained(session))
        session.accumulation.step = state["accumulation"]
        for put_back in self._put_back:
            put_back()
        STATUS_RECORD.went_back_to(self._run_step)
        rng.restore(copy.deepcopy(state["generators"]))

    def _stateful(self, session: Session) -> list[Any]:
        """The objects with a state: optimizers, schedulers, loss scale, registered objects and histories."""
        prepared = session.prepared
        optimizers = [inner_optimizer(optimizer) for optimizer in prepared.optimizers]
        scaler = [] if prepared.scaler is None else [prepared.scaler]
        return [*optimizers, *prepared.schedulers, *scaler, *prepared.custom, *self._histories]


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


def _trained(session: Session) -> tuple[list[Any], list[Any]]:
    prepared = session.prepared
    return prepared.for_strategy(ObjectKind.MODEL), prepared.for_strategy(ObjectKind.OPTIMIZER)
