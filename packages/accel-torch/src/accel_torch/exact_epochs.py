"""Steps of exact epochs in which a process has a stand-in instead of data: what they leave behind is put back.

The loss of a stand-in is multiplied by 0, which alone is not enough: 0 x infinity is NaN, forward updates buffers and
draws random numbers, and a forward that communicates would mix the stand-in with real samples.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Module, SyncBatchNorm

from accel_data.sharding import StepCounts
from accel_ops.rng import restore, snapshot
from accel_ops.tree import leaves_with_paths
from accel_plugins.bundle import Bundle
from accel_plugins.layers import strategy_model
from accel_state.errors import Conflict, NotOffered
from accel_state.protocol.state import protocol_state
from accel_torch.hooks import Hook

if TYPE_CHECKING:
    from accel_torch.session import Session

__all__ = ("check_models", "keep_exact")

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
    if session.stand_ins is None:
        session.stand_ins = StandIns(session)
        session.hooks.enter(session.stand_ins)
    loader.stand_in = session.stand_ins.around


class StandIns(Hook):
    """Puts buffers and random states back after a step in which this process has a stand-in.

    Args:
        session: the session.
    """

    def __init__(self, session: Session) -> None:
        # Weak: the session has a reference to its hooks.
        self._session = weakref.ref(session)
        self._put_back: Callable[[], None] | None = None

    def after_prepare(self, session: Session, bundle: Bundle) -> None:
        """Refuse models whose first forward calls a collective of this library."""
        if session.process.world_size > 1:
            for model in bundle.models:
                _watch_first_forward(model, session)

    def before_save(self) -> None:
        """Save the states from before the stand-in."""
        if self._put_back is not None:
            self._put_back()

    @contextmanager
    def around(self, counts: StepCounts, index: int) -> Iterator[None]:
        """Block of a step in which some processes have stand-ins.

        Args:
            counts: the samples of each process.
            index: index of this process among them.
        """
        session = self._session()
        models = [] if session is None else [strategy_model(model) for model in session.prepared.models]
        if counts.of(index):
            yield
        else:
            buffers = [(buffer, buffer.detach().clone()) for model in models for buffer in model.buffers()]
            generators = snapshot()

            def put_back() -> None:
                with torch.no_grad():
                    for buffer, before in buffers:
                        buffer.copy_(before)
                restore(generators)

            self._put_back = put_back
            with ExitStack() as stack:
                for model in models:
                    stack.callback(model.register_forward_hook(_without_gradients).remove)
                yield
            self._put_back = None
            put_back()
        if session is not None and not counts.of(0):
            with_data = next(shard for shard in range(counts.processes) if counts.of(shard))
            for model in models:
                session.strategy.share_buffers(model, with_data)


def _without_gradients(module: Module, inputs: Any, outputs: Any) -> None:
    """Make the gradients of a model's outputs zero, also where the loss is not finite."""
    for _, leaf in leaves_with_paths(outputs):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]


def _watch_first_forward(model: Module, session: Session) -> None:
    """Raise an error if the first forward of a model in training calls a collective of this library."""
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
