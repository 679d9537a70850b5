"""The strategy: data parallelism with compressed gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from accel_backend_example.compression import Compressor
from accel_backend_example.config import ExampleConfig
from accel_plugins import Bundle, Context, Strategy

__all__ = ("TopKStrategy",)


class TopKStrategy(Strategy):
    """Every process holds the whole model and sends the largest entries of its gradients.

    What it has not sent yet belongs to the state of the run, so it is in the extra state of each process.
    """

    config: ExampleConfig

    def __init__(self, context: Context, config: ExampleConfig) -> None:
        super().__init__(context, config)
        self._compressors: dict[Module, Compressor] = {}

    # ------------------------------------------------------------------ preparing

    def setup(self, bundle: Bundle) -> Bundle:
        bundle.models = [self._wrap(model) for model in bundle.models]
        return bundle

    def _wrap(self, model: Module) -> Module:
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if self.context.process.world_size == 1 or not trains:
            return model
        wrapped = DistributedDataParallel(model)
        compressor = Compressor(self.config.keep, self.config.feedback, self._scale)
        # torch compares the annotations of a hook, so it is given one without.
        wrapped.register_comm_hook(compressor, lambda state, bucket: state.exchange(bucket))
        self._compressors[wrapped] = compressor
        return wrapped

    def _scale(self) -> float:
        scaler = self.context.precision.scaler
        return 1.0 if scaler is None else scaler.get_scale()

    def unwrap(self, model: Module) -> Module:
        inner: Module = model.module if isinstance(model, DistributedDataParallel) else model
        return inner

    # ------------------------------------------------------------------ one step

    def no_sync(self, model: Module) -> AbstractContextManager[None]:
        held: AbstractContextManager[None] = (
            model.no_sync() if isinstance(model, DistributedDataParallel) else super().no_sync(model)
        )
        return held

    def sync_in_next_backward(self, model: Module) -> AbstractContextManager[None]:
        if isinstance(model, DistributedDataParallel):
            return _syncing_late(model)
        return super().sync_in_next_backward(model)

    def average_parameters(self, model: Module) -> None:
        transport = self.context.process.transport
        for parameter in self.unwrap(model).parameters():
            # Detached and not `.data`: writing raises the version of the parameter, which a snapshot compares.
            mean = parameter.detach()
            transport.all_reduce(mean).wait()
            mean /= transport.world_size

    def join(self, models: Sequence[Module], even_batches: bool | None = None) -> AbstractContextManager[None]:
        wrapped: list[Any] = [model for model in models if isinstance(model, DistributedDataParallel)]
        joined: AbstractContextManager[None] = Join(wrapped) if wrapped else super().join(models, even_batches)
        return joined

    def sent_bytes(self) -> int:
        """How much gradient data this process has sent."""
        return sum(compressor.sent_bytes for compressor in self._compressors.values())

    # ------------------------------------------------------------------ checkpoints

    def extra_state(self, models: Sequence[Module], optimizers: Sequence[Any]) -> Mapping[str, Any]:
        return {"unsent": [self._unsent(model) for model in models]}

    def _unsent(self, model: Module) -> dict[str, Tensor]:
        """By name in the user's model, what this process has not sent yet."""
        kept = self._compressors[model].unsent if model in self._compressors else {}
        return {name: kept[parameter] for name, parameter in self.unwrap(model).named_parameters() if parameter in kept}

    def load_extra_state(self, state: Mapping[str, Any], models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        device = self.context.process.device
        for model, unsent in zip(models, state["unsent"], strict=True):
            named = dict(self.unwrap(model).named_parameters())
            if model in self._compressors:
                self._compressors[model].unsent = {named[name]: kept.to(device) for name, kept in unsent.items()}

    # ------------------------------------------------------------------ the end

    def release(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        self._compressors = {model: one for model, one in self._compressors.items() if model not in models}

    def close(self) -> None:
        self._compressors.clear()


@contextmanager
def _syncing_late(model: DistributedDataParallel) -> Iterator[None]:
    """Backward exchanges gradients, though forward ran under `no_sync` and did not prepare for it."""
    before = model.require_backward_grad_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    try:
        model.reducer.prepare_for_backward([])
        yield
    finally:
        model.require_backward_grad_sync = before
