"""The strategy with DeepSpeed's engine, which owns accumulation, precision and clipping.

The engine makes the whole step within backward, as its users expect: at the end of an accumulation window it reduces
and clips gradients, steps the optimizer, and advances the schedule.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn import Module

from accel_plugins.bundle import Bundle
from accel_plugins.context import Context
from accel_plugins.deepspeed.config import DeepSpeedPlugin, transformers_view
from accel_plugins.deepspeed.engine import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    batch_values,
    before_each_update,
    check_placeholders,
    end,
    full_gradients,
    full_weights,
    is_engine,
    load_engine,
    parameters_behind,
    put_engine_weights,
    start,
    tag_of,
)
from accel_plugins.manifest import ObjectKind
from accel_plugins.matrix_optimizers import refuse_matrix_optimizers
from accel_plugins.strategy import Strategy
from accel_state import current
from accel_state.errors import Conflict, NotOffered, NotReady

if TYPE_CHECKING:
    from accel_plugins.deepspeed.ulysses import Ulysses

__all__ = ("DeepSpeedStrategy",)

_OwnStore: Any = torch._C._distributed_c10d.HashStore
"""The rendezvous address of a single process."""


class DeepSpeedStrategy(Strategy):
    """Optimizer states, gradients and parameters divided by ZeRO.

    Args:
        context: the context of the run.
        config: the configuration, or several by name; the selected one is active, by default the first.
    """

    def __init__(self, context: Context, config: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin]) -> None:
        super().__init__(context, config)
        self._plugins = tuple(config.values()) if isinstance(config, Mapping) else (config,)
        self._engines: list[DeepSpeedEngineWrapper] = []
        self._forwarded: set[int] = set()
        self._stepping: Module | None = None
        self._loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ulysses: Ulysses | None = None
        current.publish_for_run({"ACCELERATE_USE_DEEPSPEED": "true"})
        current.on_run_end(lambda: self.release([wrapped.engine for wrapped in self._engines], []))
        self._tell_precision()
        self._agree_on_steps()
        self._plugin.select(_from_accelerator_state=True)
        if not dist.is_initialized():
            dist.init_process_group(store=_OwnStore(), rank=0, world_size=1)
            # DeepSpeed requires this variable, which launchers set.
            current.publish_for_run({"LOCAL_RANK": str(context.process.topology.local_rank)})
        parallelism_config = context.parallelism_config
        if parallelism_config is not None and parallelism_config.sp_by_engine:
            from accel_plugins.deepspeed.ulysses import Ulysses

            self._ulysses = Ulysses(parallelism_config, context.process.device)

    @property
    def engine(self) -> DeepSpeedEngineWrapper | None:
        """The engine that was created first."""
        return self._engines[0] if self._engines else None

    @property
    def _plugin(self) -> DeepSpeedPlugin:
        """The active configuration."""
        return next((plugin for plugin in self._plugins if plugin.selected), self._plugins[0])

    def _tell_precision(self) -> None:
        """Set the run's precision in every configuration."""
        precision, family = self.context.precision, self.context.process.family
        if precision.name == "fp16" and not get_accelerator().is_fp16_supported():
            raise NotOffered(
                "Cannot use mixed_precision='fp16' with DeepSpeed.",
                f"DeepSpeed does not train in fp16 on devices of the family {family.name!r}.",
                "Use mixed_precision='bf16'.",
            )
        for plugin in self._plugins:
            plugin.set_mixed_precision(precision.name)

    def _agree_on_steps(self) -> None:
        """Set the run's number of accumulated micro-batches from the configuration."""
        gradient = self.context.gradient
        configured = self._plugin.agree_on_steps(gradient.num_steps)
        if configured is not None and configured != gradient.num_steps:
            if gradient.num_steps != 1:
                raise Conflict(
                    f"Cannot accumulate with gradient_accumulation_steps={gradient.num_steps}.",
                    f"The DeepSpeed configuration has gradient_accumulation_steps={configured}.",
                    'Set it in one place, and write "auto" in the other.',
                )
            gradient.plugin = dataclasses.replace(gradient.plugin, num_steps=configured)
        for plugin in self._plugins:
            plugin.agree_on_steps(gradient.num_steps)

    # ------------------------------------------------------------------ preparing

    def check(self, bundle: Bundle) -> None:
        if len(bundle.models) > 1 and bundle.optimizers:
            raise Conflict(
                f"Cannot prepare {len(bundle.models)} models and an optimizer in one call.",
                "A DeepSpeed engine has exactly one model.",
                "Prepare each model with its optimizer in a separate call.",
            )
        if bundle.optimizers and (not bundle.models or len(bundle.optimizers) > 1):
            raise Conflict(
                f"Cannot prepare {len(bundle.optimizers)} optimizers and {len(bundle.models)} models in one call.",
                "A DeepSpeed engine has exactly one model and one optimizer.",
                "Prepare each model together with its optimizer.",
            )
        refuse_matrix_optimizers(bundle.optimizers, "DeepSpeed")
        if bundle.optimizers and self.context.precision.name == "fp16":
            _check_scaling(self._plugin)
        check_placeholders(self._plugin, bundle)

    def place(self, model: Module) -> Module:
        # The engine moves it; a model that was created in shards cannot be moved.
        return model

    def setup(self, bundle: Bundle) -> Bundle:
        if not bundle.models:
            return bundle
        plugin = self._plugin
        if not bundle.optimizers and not plugin.hf_ds_config.is_zero3():
            bundle.models[:] = [self._plain(model) for model in bundle.models]
            return bundle
        gradient, ulysses = self.context.gradient, self._ulysses
        together = 1 if ulysses is None else ulysses.count
        sizes = batch_values(plugin, bundle, self.shards().count, gradient.num_steps, together, self._loaders)
        started = start(plugin, bundle, self.context.precision.dtype, sizes, ulysses)
        started.engine.register_forward_hook(lambda *_: self._forwarded.add(id(started.engine)))
        before_each_update(started.engine, self._announce_gradients)
        self._engines.append(DeepSpeedEngineWrapper(started.engine))
        if plugin.hf_ds_config.is_zero3() and not plugin.is_zero3_init_enabled():
            # A model that was created unsharded is sharded now too, so transformers synchronises processes in
            # `generate`.
            plugin.dschf = transformers_view(plugin.deepspeed_config, sharded=True)
        bundle.models[:] = [started.engine]
        bundle.optimizers[:] = [DeepSpeedOptimizerWrapper(started.optimizer, gradient) for _ in bundle.optimizers]
        if started.scheduler is not None:
            bundle.schedulers[:] = [
                DeepSpeedSchedulerWrapper(started.scheduler, bundle.optimizers, gradient) for _ in bundle.schedulers
            ]
        return bundle

    def _plain(self, model: Module) -> Module:
        """Prepare a model that is only evaluated and not sharded."""
        return model.to(device=self.context.process.device, dtype=self.context.precision.dtype)

    def wrap_loader(self, loader: Any) -> Iterable[Any]:
        self._loaders.add(loader)
        wrapped: Iterable[Any] = loader if self._ulysses is None else self._ulysses.loader(loader)
        return wrapped

    def unwrap(self, model: Module) -> Module:
        inner: Module = model.module if is_engine(model) else model  # type: ignore[assignment]
        return inner

    # ------------------------------------------------------------------ one step

    def backward(self, loss: Tensor, model: Module | None = None, **kwargs: Any) -> None:
        wrapped = self._engine_of(loss, model)
        self._forwarded.discard(id(wrapped.engine))
        wrapped.backward(loss, self.context.gradient.sync_gradients, **kwargs)

    def _engine_of(self, loss: Tensor, model: Module | None) -> DeepSpeedEngineWrapper:
        """The engine of the model that computed the loss.

        If the caller passes no model, it is the only training engine; of several, the only one that has run forward; of
        several of these, the one with parameters in the graph of the loss.
        """
        training = [wrapped for wrapped in self._engines if wrapped.engine.optimizer is not None]
        training = [wrapped for wrapped in training if wrapped.engine is model] or training
        if len(training) > 1:
            training = [wrapped for wrapped in training if id(wrapped.engine) in self._forwarded]
        if len(training) > 1:
            used = parameters_behind(loss)
            training = [wrapped for wrapped in training if any(id(own) in used for own in _parameters_of(wrapped))]
        if len(training) == 1:
            return training[0]
        raise NotReady(
            "Cannot call backward(loss) with DeepSpeed.",
            f"The loss may come from any of {len(training)} prepared models."
            if training
            else "No model was prepared together with an optimizer.",
            "Freeze the models that do not train, and call them through accelerator.unwrap_model()."
            if training
            else "Pass model and optimizer to prepare() in one call.",
        )

    def _announce_gradients(self, engine: Module) -> None:
        if self.on_gradients is not None:
            self._stepping = engine
            try:
                self.on_gradients(engine)
            finally:
                self._stepping = None

    def gradients(self, model: Module) -> dict[str, Tensor]:
        if not is_engine(model):
            return super().gradients(model)
        # They do not exist before backward, and the step frees them.
        return full_gradients(model) if model is self._stepping else {}

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Any:
        listed = list(parameters)
        clipped = {id(parameter) for parameter in listed}
        holders = [wrapped for wrapped in self._engines if any(id(own) in clipped for own in _parameters_of(wrapped))]
        if not holders:
            return super().clip_norm(listed, max_norm, norm_type)
        for wrapped in holders:
            _check_clipping(wrapped.engine, max_norm, norm_type)
        # Floats, as scripts for DeepSpeed expect; None while an engine accumulates.
        norms = [float(norm) for wrapped in holders if (norm := wrapped.get_global_grad_norm()) is not None]
        return norms[0] if len(norms) == 1 else math.hypot(*norms) if norms else None

    # ------------------------------------------------------------------ checkpoints

    save_options = frozenset({"client_state", "exclude_frozen_parameters", "save_latest"})

    def collect(self, kind: ObjectKind, item: Any) -> Any:
        """The object itself if the engine saves it, because the engine collects and writes together."""
        if is_engine(item) or isinstance(item, (DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper)):
            return item
        return super().collect(kind, item)

    def save(
        self,
        kind: ObjectKind,
        state: Any,
        folder: Path,
        index: int,
        *,
        safe_serialization: bool = True,
        **options: Any,
    ) -> None:
        if is_engine(state):
            state.save_checkpoint(str(folder), tag_of(index), **options)
        elif self.context.process.rank == 0 and not isinstance(
            state, (DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper)
        ):
            super().save(kind, state, folder, index, safe_serialization=safe_serialization)

    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        if is_engine(item):
            options.pop("map_location", None)
            client_state = load_engine(item, folder, index, self.context.process, options)
            for wrapped in self._engines:
                if wrapped.engine is item:
                    wrapped.client_state = client_state
        elif not isinstance(item, (DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper)):
            super().load(kind, item, folder, index, **options)

    def state_dict(self, model: Module) -> dict[str, Tensor]:
        return full_weights(model) if is_engine(model) else super().state_dict(model)

    def load_weights(self, model: Module, weights: Mapping[str, Tensor], strict: bool = True) -> None:
        if is_engine(model):
            put_engine_weights(model, weights, strict)
        else:
            super().load_weights(model, weights, strict)

    def writes_weights(self) -> bool:
        return self.context.process.rank == 0

    def release(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        released = [wrapped for wrapped in self._engines if any(wrapped.engine is model for model in models)]
        for wrapped in released:
            end(wrapped.engine)
            self._engines.remove(wrapped)
            self._forwarded.discard(id(wrapped.engine))

    def close(self) -> None:
        if self._ulysses is not None:
            self._ulysses.close()


def _parameters_of(wrapped: DeepSpeedEngineWrapper) -> Iterator[Tensor]:
    parameters: Iterator[Tensor] = wrapped.engine.module.parameters()
    return parameters


def _check_scaling(plugin: DeepSpeedPlugin) -> None:
    """Raise for fp16 without sharding, because the gradients of steps would be far too small.

    Raises:
        NotOffered: fp16 with stage 0.
    """
    if int(plugin.get_value("zero_optimization.stage", 0)) == 0:
        raise NotOffered(
            "Cannot train in fp16 with ZeRO stage 0.",
            "With stage 0, DeepSpeed divides gradients by the loss scale but does not multiply the loss by it (seen "
            "in 0.19.8).",
            "Use zero_stage=1, or mixed_precision='bf16'.",
        )


def _check_clipping(engine: Any, max_norm: float, norm_type: float) -> None:
    """Raise for a norm other than the engine's, because the engine has already stepped.

    Raises:
        Conflict: the engine clips with another norm.
    """
    configured = float(engine.gradient_clipping() or 0.0)
    if configured == max_norm and norm_type == 2.0:
        return
    clips = f"clips to {configured} in the 2-norm" if configured else "is configured without clipping"
    raise Conflict(
        f"Cannot call clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}).",
        f"DeepSpeed clips in its step, within backward, and {clips}.",
        f"Set DeepSpeedPlugin(gradient_clipping={max_norm}), or remove the call.",
    )
