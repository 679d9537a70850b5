"""The strategy with Megatron-LM, which owns accumulation, precision and clipping.

Megatron-LM builds a new, sharded model. `prepare` returns an engine instead of the model. Calling it with a batch makes
a whole step; backward and the steps of optimizer and schedule then do nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from accel_megatron import building, parallel
from accel_megatron.config import MegatronLMPlugin
from accel_megatron.engine import MegatronEngine
from accel_megatron.objects import (
    JoinedLoader,
    MegatronLMDummyDataLoader,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
    MegatronLoader,
)
from accel_megatron.parallel import parallel_state
from accel_plugins.bundle import Bundle
from accel_plugins.context import Context
from accel_plugins.manifest import ObjectKind
from accel_plugins.shards import Shards
from accel_plugins.strategy import Strategy
from accel_state import current
from accel_state.errors import Conflict, NotOffered

__all__ = ("MegatronStrategy",)

_OwnStore: Any = torch._C._distributed_c10d.HashStore
"""The rendezvous address of a single process."""


class MegatronStrategy(Strategy):
    """Shards tensors, layers, the sequence and experts over processes.

    Args:
        context: the context of the run.
        config: the settings.

    Attributes:
        engine: the engine, or None before `prepare`.

    Raises:
        NotOffered: there is no CUDA device, or Megatron-LM does not support the precision.
        Conflict: the run sets gradient accumulation too.
    """

    def __init__(self, context: Context, config: MegatronLMPlugin) -> None:
        super().__init__(context, config)
        parallel.demand_cuda()
        current.publish_for_run({"ACCELERATE_USE_MEGATRON_LM": "true"})
        self.engine: MegatronEngine | None = None
        self._drawn: dict[int, int] = {}
        config.set_mixed_precision(context.precision.name)
        self._agree_on_steps()
        if not dist.is_initialized():
            dist.init_process_group(store=_OwnStore(), rank=0, world_size=1)
        parallel.create_groups(config)
        parallel.seed(config)

    def _agree_on_steps(self) -> None:
        steps = self.context.gradient.num_steps
        if steps != 1:
            raise Conflict(
                f"Cannot use gradient_accumulation_steps={steps} with Megatron-LM.",
                "Megatron-LM itself accumulates over the micro-batches of a step.",
                f"Use MegatronLMPlugin(num_micro_batches={steps}).",
            )

    @property
    def _megatron_context(self) -> parallel.MegatronContext:
        return parallel.MegatronContext(self.config, self.context.process.device)

    # ------------------------------------------------------------------ preparing

    def check(self, bundle: Bundle) -> None:
        if not bundle.models and not bundle.optimizers:
            return
        if (len(bundle.models), len(bundle.optimizers)) != (1, 1) or len(bundle.schedulers) > 1:
            raise Conflict(
                f"Cannot prepare {len(bundle.models)} models, {len(bundle.optimizers)} optimizers and "
                f"{len(bundle.schedulers)} schedulers.",
                "Megatron-LM trains one model with one optimizer and one schedule.",
                "Pass one of each, in one call.",
            )
        if self.engine is not None:
            raise Conflict(
                "Cannot prepare a second model.",
                "Megatron-LM trains one model in a run.",
                "Train the second model in another run.",
            )
        building.check_batches(self.config, bundle)

    def place(self, model: Module) -> Module:
        # Only its configuration is used, so its weights need no device.
        return model

    def shards(self) -> Shards:
        return Shards(parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank())

    def shard_key(self, tensor: Tensor) -> Hashable:
        # Megatron-LM marks the parameters that it divides between tensor-parallel ranks.
        sharded = getattr(tensor, "tensor_model_parallel", False)
        tensor_rank = parallel_state.get_tensor_model_parallel_rank() if sharded else None
        return (tensor_rank, parallel_state.get_pipeline_model_parallel_rank())

    def setup(self, bundle: Bundle) -> Bundle:
        if not bundle.models:
            return bundle
        (model,), (optimizer,) = bundle.models, bundle.optimizers
        building.take_sizes(self.config, bundle, self.shards().count)
        started = building.start_megatron(self._megatron_context, model, optimizer, next(iter(bundle.schedulers), None))
        self.engine = MegatronEngine(self._megatron_context, *started)
        gradient = self.context.gradient
        wrapped = MegatronLMOptimizerWrapper(started.optimizer, gradient)
        self.engine.optimizer = wrapped
        bundle.models[:], bundle.optimizers[:] = [self.engine], [wrapped]
        if started.scheduler is not None and bundle.schedulers:
            bundle.schedulers[:] = [MegatronLMSchedulerWrapper(started.scheduler, [wrapped], gradient)]
        return bundle

    def unwrap(self, model: Module) -> Module:
        inner: Module = model.base_model if isinstance(model, MegatronEngine) else model
        return inner

    def wrap_loader(self, loader: Any) -> Iterable[Any]:
        if isinstance(loader, MegatronLMDummyDataLoader):
            drawn = self._drawn.get(id(loader), 0)
            self._drawn[id(loader)] = drawn + 1
            source = building.iterators_of(self._megatron_context, loader)
            return MegatronLoader(source, min(drawn, 2), loader.dataset_args)
        count = self.config.num_micro_batches
        return loader if count == 1 else JoinedLoader(loader, count)

    # ------------------------------------------------------------------ one step

    def backward(self, loss: Tensor, model: Module | None = None, **kwargs: Any) -> None:
        """Do nothing: the engine computed gradients when it was called."""

    def step(self, optimizer: Any, closure: Any = None) -> bool:
        """Do nothing: the engine has already stepped."""
        return not getattr(optimizer, "step_was_skipped", False)

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        if self.config.gradient_clipping != max_norm or norm_type != 2.0:
            raise Conflict(
                f"Cannot call clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}).",
                f"Megatron-LM clips within a step, to gradient_clipping={self.config.gradient_clipping} in the 2-norm.",
                f"Set MegatronLMPlugin(gradient_clipping={max_norm}), or remove the call.",
            )
        norm = None if self.engine is None else self.engine.grad_norm
        return None if norm is None else torch.tensor(norm)

    # ------------------------------------------------------------------ checkpoints

    def collect(self, kind: ObjectKind, item: Any) -> Any:
        """The object itself if the engine saves it, because the engine collects and writes together."""
        return item if _is_ours(item) else super().collect(kind, item)

    def save(self, kind: ObjectKind, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
        if isinstance(state, MegatronEngine):
            state.save_checkpoint(folder)
        elif not _is_ours(state) and self.context.process.rank == 0:
            super().save(kind, state, folder, index, safe_serialization=safe_serialization)

    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        if isinstance(item, MegatronEngine):
            item.load_checkpoint(folder)
        elif not _is_ours(item):
            super().load(kind, item, folder, index, **options)

    def state_dict(self, model: Module) -> dict[str, Tensor]:
        self._refuse_parts("read")
        return super().state_dict(model)

    def load_weights(self, model: Module, weights: Mapping[str, Tensor], strict: bool = True) -> None:
        self._refuse_parts("replace")
        super().load_weights(model, weights, strict)

    def _refuse_parts(self, what: str) -> None:
        held = parallel.size_of_one_model(self.config) // self.config.context_parallel_size
        if held > 1 or self.config.num_layers_per_virtual_pipeline_stage:
            raise NotOffered(
                f"Cannot {what} all weights of a model of Megatron-LM.",
                f"It has {held} shards; their names and shapes differ from those of a full model.",
                "Use save_state() and load_state(): Megatron-LM can load its checkpoints with other degrees.",
            )

    def writes_weights(self) -> bool:
        return self.context.process.rank == 0

    def release(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        if any(self.engine is model for model in models):
            self.engine = None

    def close(self) -> None:
        self.engine = None
        parallel_state.destroy_model_parallel()


def _is_ours(item: Any) -> bool:
    return isinstance(item, (MegatronEngine, MegatronLMOptimizerWrapper, MegatronLMSchedulerWrapper))
