"""The data-parallel strategy, based on `torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch.distributed.algorithms.join import Join
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from accel_ops.reduction import reduce
from accel_plugins.bundle import Bundle
from accel_plugins.ddp.config import DistributedDataParallelKwargs
from accel_plugins.strategy import Strategy
from accel_state.errors import Conflict, NotOffered
from accel_state.labels import DEVICE_MAP

__all__ = ("DDPStrategy",)


class DDPStrategy(Strategy):
    """Every process has the whole model; backward averages the gradients."""

    config: DistributedDataParallelKwargs

    def check(self, bundle: Bundle) -> None:
        for model in bundle.models:
            devices = {str(device) for device in getattr(model, DEVICE_MAP, {}).values()}
            if len(devices) > 1:
                raise Conflict(
                    f"Cannot prepare {type(model).__name__} in a run of several processes.",
                    f"A device map places it on {', '.join(sorted(devices))}, but each process needs it on one device.",
                    "Load it without a device map, or launch one process.",
                )

    def setup(self, bundle: Bundle) -> Bundle:
        bundle.models = [self._wrap(model) for model in bundle.models]
        return bundle

    def _wrap(self, model: Module) -> Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        device = self.context.process.device
        # torch requires a list of ids for devices that have an index, and no list for others.
        ids = None if device.index is None else [device.index]
        wrapped = DistributedDataParallel(model, device_ids=ids, output_device=device.index, **self.config.to_kwargs())
        self.config.register_comm_hook(wrapped)
        return wrapped

    def unwrap(self, model: Module) -> Module:
        parallel = _parallel(model)
        if parallel is None:
            return model
        inner: Module = parallel.module
        return inner

    def no_sync(self, model: Module) -> AbstractContextManager[None]:
        parallel = _parallel(model)
        # The order of the reductions in a static graph is recorded once, so each backward makes all of them.
        if parallel is None or parallel.static_graph:
            return super().no_sync(model)
        return _Syncing(parallel, False)

    def sync_in_next_backward(self, model: Module) -> AbstractContextManager[None]:
        parallel = _parallel(model)
        if parallel is None or parallel.static_graph:
            return super().sync_in_next_backward(model)
        if parallel.find_unused_parameters:
            raise NotOffered(
                "Cannot synchronise gradients in the next backward, after a forward without synchronisation.",
                "With find_unused_parameters=True, DistributedDataParallel must search the outputs of that forward "
                "for unused parameters.",
                "Remove find_unused_parameters, or run the last forward outside no_sync.",
            )
        return _SyncingLate(parallel)

    def average_parameters(self, model: Module) -> None:
        # `detach()` instead of `.data`: the write then increments the parameter's version, which snapshots compare.
        parameters = [parameter.detach() for parameter in self.unwrap(model).parameters()]
        for parameter, mean in zip(parameters, reduce(parameters, op="mean"), strict=True):
            parameter.copy_(mean)

    def join(self, models: Sequence[Module], even_batches: bool | None = None) -> AbstractContextManager[None]:
        joinable: list[Any] = [parallel for model in models if (parallel := _parallel(model)) is not None]
        if not joinable:
            return super().join(models, even_batches)
        joined: AbstractContextManager[None] = Join(joinable)
        return joined


def _parallel(model: Any) -> DistributedDataParallel | None:
    """The wrapper that `setup` added to a model, or None for a model without trainable parameters."""
    return model if isinstance(model, DistributedDataParallel) else None


class _Syncing:
    """A context that switches the reduction of gradients on or off; cheaper than the generator of `DDP.no_sync`."""

    __slots__ = ("_before", "_model", "_sync")

    def __init__(self, model: DistributedDataParallel, sync: bool) -> None:
        self._model = model
        self._sync = sync

    def __enter__(self) -> None:
        self._before = self._model.require_backward_grad_sync
        self._model.require_backward_grad_sync = self._sync

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model.require_backward_grad_sync = self._before


class _SyncingLate(_Syncing):
    """Reduces gradients in backward although forward ran without: it prepares the reducer as forward would."""

    __slots__ = ()

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__(model, True)

    def __enter__(self) -> None:
        super().__enter__()
        self._model.require_forward_param_sync = True
        if torch.is_grad_enabled():
            self._model.reducer.prepare_for_backward([])
