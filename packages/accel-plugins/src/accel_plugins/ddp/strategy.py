"""The data-parallel strategy, based on `torch.nn.parallel.DistributedDataParallel`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.distributed.algorithms.join import Join
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from accel_ops.reduction import reduce
from accel_plugins.bundle import Bundle
from accel_plugins.context import Context
from accel_plugins.ddp.config import DistributedDataParallelKwargs
from accel_plugins.unreduced import AveragingStrategy, UnreducedGradients
from accel_state.errors import Conflict, NotOffered
from accel_state.labels import DEVICE_MAP

__all__ = ("DDPStrategy",)


class DDPStrategy(AveragingStrategy):
    """Every process has the whole model; backward averages the gradients."""

    config: DistributedDataParallelKwargs

    def __init__(self, context: Context, config: DistributedDataParallelKwargs) -> None:
        super().__init__(context, config)
        self._unwrapped: weakref.WeakKeyDictionary[Module, _Unwrapped] = weakref.WeakKeyDictionary()

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
            unwrapped = self._unwrapped[model] = _Unwrapped()
            self.unreduced[model] = self._average(model, model.parameters(), unwrapped)
            return model
        # torch requires a list of ids for devices that have an index, and no list for others. Tensors on a CPU have
        # none, also in a run whose setting gives the CPU one.
        on_host = next(model.parameters()).device.index is None
        index = None if on_host else self.context.process.device.index
        ids = None if index is None else [index]
        wrapped = DistributedDataParallel(model, device_ids=ids, output_device=index, **self.config.to_kwargs())
        self.config.register_comm_hook(wrapped)
        ignored = wrapped.parameters_to_ignore
        frozen = (one for name, one in model.named_parameters() if not one.requires_grad and name not in ignored)
        self.unreduced[wrapped] = self._average(model, frozen, wrapped)
        return wrapped

    def _average(
        self, model: Module, parameters: Iterable[Parameter], wrapper: DistributedDataParallel | _Unwrapped
    ) -> UnreducedGradients:
        """Average the gradients of parameters that `DistributedDataParallel` does not reduce."""
        referred = weakref.ref(wrapper)

        def reduces() -> bool:
            wrapper = referred()
            return wrapper is not None and wrapper.require_backward_grad_sync

        return UnreducedGradients(model, parameters, self.context.process.transport, reduces)

    def unwrap(self, model: Module) -> Module:
        parallel = _parallel(model)
        if parallel is None:
            return model
        inner: Module = parallel.module
        return inner

    def no_sync(self, model: Module) -> AbstractContextManager[None]:
        wrapper = _parallel(model) or self._unwrapped.get(model)
        # The order of the reductions in a static graph is recorded once, so each backward makes all of them.
        if wrapper is None or wrapper.static_graph:
            return super().no_sync(model)
        return _Syncing(wrapper, False)

    def passes_are_local(self, model: Module) -> bool:
        wrapper = _parallel(model) or self._unwrapped.get(model)
        return super().passes_are_local(model) and not (wrapper is not None and wrapper.static_graph)

    def sync_in_next_backward(self, model: Module) -> AbstractContextManager[None]:
        parallel = _parallel(model)
        if parallel is None:
            unwrapped = self._unwrapped.get(model)
            return super().sync_in_next_backward(model) if unwrapped is None else _Syncing(unwrapped, True)
        if parallel.static_graph:
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

    def share_buffers(self, model: Module, source: int) -> None:
        parallel = _parallel(model)
        if parallel is not None and self.config.broadcast_buffers:
            for buffer in parallel.module.buffers():
                torch.distributed.broadcast(buffer, group=parallel.process_group, group_src=source)

    def join(self, models: Sequence[Module], even_batches: bool | None = None) -> AbstractContextManager[None]:
        joinable: list[Any] = [parallel for model in models if (parallel := _parallel(model)) is not None]
        return self._joining(models, Join(joinable) if joinable else super().join(models, even_batches))

    @contextmanager
    def _joining(self, models: Sequence[Module], inside: AbstractContextManager[None]) -> Iterator[None]:
        unreduced = [gradients for model in models if (gradients := self.unreduced.get(model)) is not None]
        for gradients in unreduced:
            gradients.joins = True
        try:
            with inside:
                yield
        finally:
            for gradients in unreduced:
                gradients.joins = False


def _parallel(model: Any) -> DistributedDataParallel | None:
    """The wrapper that `setup` added to a model, or None for a model without trainable parameters."""
    return model if isinstance(model, DistributedDataParallel) else None


class _Unwrapped:
    """Whether backward reduces the gradients of a model that had nothing to train, and so has no wrapper.

    Attributes:
        require_backward_grad_sync, static_graph: as in `DistributedDataParallel`.
    """

    static_graph = False

    def __init__(self) -> None:
        self.require_backward_grad_sync = True


class _Syncing:
    """A context that switches the reduction of gradients on or off; cheaper than the generator of `DDP.no_sync`."""

    __slots__ = ("_before", "_model", "_sync")

    def __init__(self, model: DistributedDataParallel | _Unwrapped, sync: bool) -> None:
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

    __slots__ = ("_parallel",)

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__(model, True)
        self._parallel = model

    def __enter__(self) -> None:
        super().__enter__()
        self._parallel.require_forward_param_sync = True
        if torch.is_grad_enabled():
            self._parallel.reducer.prepare_for_backward([])
