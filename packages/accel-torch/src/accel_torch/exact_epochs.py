"""Steps of exact epochs in which a process has a stand-in instead of data: what they leave behind is put back.

The loss of a stand-in is multiplied by 0, which alone is not enough: 0 x infinity is NaN, forward updates buffers and
draws random numbers, and a forward that communicates would mix the stand-in with real samples.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Module, SyncBatchNorm

from accel_data.sharding import StepCounts
from accel_ops.rng import restore, snapshot
from accel_ops.tree import leaves_with_paths
from accel_plugins.layers import strategy_model
from accel_state.errors import Conflict, NotOffered
from accel_state.protocol.state import protocol_state
from accel_torch.hooks import Hook

if TYPE_CHECKING:
    from accel_torch.session import Session

__all__ = ("check_models", "keep_exact", "watch_first_forwards")

_FAILED: Final = "Cannot train with exact_epochs=True."


def check_models(session: Session, models: Sequence[Module]) -> None:
    """Check that no model communicates in its forward pass.

    Raises:
        Conflict: a model has a SyncBatchNorm.
    """
    if not session.options.loader.exact_epochs or session.strategy.shards().count == 1:
        return
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, SyncBatchNorm):
                raise Conflict(
                    _FAILED,
                    f"The module {name!r} of {type(model).__name__} is a SyncBatchNorm, which would average the "
                    "stand-ins of processes without data with real samples.",
                    "Use BatchNorm or another norm, or even_batches without exact_epochs.",
                )


def keep_exact(session: Session, loader: Any) -> None:
    """Let a prepared loader with exact epochs weight its batches and put back what stand-ins change.

    Raises:
        NotOffered: the backend computes the loss itself, or divides it while it accumulates, or the number of processes
            may change.
    """
    capabilities = session.backend.capabilities
    divides = capabilities.own_accumulation and session.gradient.num_steps > 1
    if capabilities.elastic or capabilities.loss_in_forward or divides:
        raise NotOffered(
            _FAILED,
            f"The backend {session.backend.name!r} weights the batches of a step itself.",
            "Use another backend, or even_batches without exact_epochs"
            + (", or one micro-batch for each step." if divides else "."),
        )
    session.accumulation.weigh_samples()
    # Weak: the session has a reference to the loader.
    session_reference = weakref.ref(session)

    def stand_in(counts: StepCounts, index: int) -> AbstractContextManager[None]:
        session = session_reference()
        return nullcontext() if session is None else _step_with_stand_ins(session, counts, index)

    loader.stand_in = stand_in


@contextmanager
def _step_with_stand_ins(session: Session, counts: StepCounts, index: int) -> Iterator[None]:
    """Block of a step in which some processes have stand-ins.

    Args:
        session: the session.
        counts: the samples of each process.
        index: index of this process among them.
    """
    models = [strategy_model(model) for model in session.prepared.models]
    if counts.of(index):
        yield
    else:
        before = _StatesBefore(models)
        session.hooks.enter(before)
        with ExitStack() as stack:
            for model in models:
                stack.callback(model.register_forward_hook(_without_gradients).remove)
            yield
        session.hooks.leave(before)
        before.put_back()
    if not counts.of(0):
        with_data = next(shard for shard in range(counts.processes) if counts.of(shard))
        for model in models:
            session.strategy.share_buffers(model, with_data)


class _StatesBefore(Hook):
    """Buffers and random states from before a step in which this process has a stand-in.

    Args:
        models: the models whose buffers are kept.
    """

    def __init__(self, models: Sequence[Module]) -> None:
        self._buffers = [(buffer, buffer.detach().clone()) for model in models for buffer in model.buffers()]
        self._generators = snapshot()

    def before_save(self) -> None:
        """Put the states back, so that they are saved."""
        self.put_back()

    def put_back(self) -> None:
        """Put the states back."""
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        restore(self._generators)


def _without_gradients(module: Module, inputs: Any, outputs: Any) -> None:
    """Make the gradients of a model's outputs zero, also where the loss is not finite."""
    for _, leaf in leaves_with_paths(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]


def watch_first_forwards(session: Session, models: Sequence[Module]) -> None:
    """Raise an error at the first forward of a model in training that calls a collective of this library."""
    if session.options.loader.exact_epochs and session.process.world_size > 1:
        for model in models:
            _watch_first_forward(model, session)


def _watch_first_forward(model: Module, session: Session) -> None:
    log = protocol_state(session.process.transport).log
    calls: list[int] = []

    def begin(module: Module, inputs: Any) -> None:
        calls[:] = [log.number]

    def end(module: Module, inputs: Any, outputs: Any) -> None:
        if not module.training:
            return
        for handle in handles:
            handle.remove()
        if calls and log.number != calls[0]:
            raise Conflict(
                _FAILED,
                f"The forward pass of {type(module).__name__} calls a collective, which would mix the stand-ins of "
                "processes without data with real samples.",
                "Call it outside the model, where loader.is_stand_in is known, or use even_batches without "
                "exact_epochs.",
            )

    handles = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
