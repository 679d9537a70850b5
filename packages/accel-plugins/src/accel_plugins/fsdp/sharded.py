"""The base of both FSDP strategies: checks, initial weights, and checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from accel_plugins.blocks import repeated_blocks
from accel_plugins.bundle import Bundle
from accel_plugins.checkpoint.shards import SavePlans
from accel_plugins.context import Context
from accel_plugins.fsdp import weights
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.sharding import arrives_sharded, blocks_to_shard, ignored_parameters
from accel_plugins.fsdp.weights import put_full_weights
from accel_plugins.manifest import Axis, ObjectKind
from accel_plugins.mesh import submesh
from accel_plugins.parameters import canonical_name
from accel_plugins.sharded_optimizers import check_shardable
from accel_plugins.transform import Transform
from accel_plugins.transforms.activation_checkpoint import ActivationCheckpoint
from accel_plugins.unreduced import AveragingStrategy, UnreducedGradients
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state import current
from accel_state.errors import Conflict, NotOffered
from accel_state.settings.schema import plain_value

__all__ = ("ShardedStrategy", "owner")


class ShardedStrategy(AveragingStrategy):
    """Shards parameters, gradients and optimizer state over the processes; subclasses implement the versions.

    A subclass implements `setup`, and `reduces_gradients` with `reduce_gradients`, which read and set whether backward
    of a model reduces gradients.
    """

    version: ClassVar[int]
    config: FullyShardedDataParallelPlugin

    def __init__(self, context: Context, config: FullyShardedDataParallelPlugin) -> None:
        super().__init__(context, config)
        if config.fsdp_version != self.version:
            raise Conflict(
                f"Cannot use the backend 'fsdp{self.version}' with fsdp_version={config.fsdp_version}.",
                "Each version has a separate backend, and the settings are for the other version.",
                f"Use fsdp_version={self.version} (or FSDP_VERSION={self.version}), or remove the backend.",
            )
        config.compute_in(context.precision.dtype)
        context.precision.step_together(context.process.transport)
        loads_alone = "true" if config.cpu_ram_efficient_loading else "false"
        current.publish_for_run({"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": loads_alone})
        self._owners: weakref.WeakKeyDictionary[Optimizer, Module] = weakref.WeakKeyDictionary()
        self._sharded: weakref.WeakSet[Module] = weakref.WeakSet()
        self._ties: weakref.WeakKeyDictionary[Module, list[list[str]]] = weakref.WeakKeyDictionary()
        self._saving_group: torch.distributed.ProcessGroup | None = None
        self._save_plans: dict[tuple[ObjectKind, int], SavePlans] = {}

    # ------------------------------------------------------------------ preparing

    def check(self, bundle: Bundle) -> None:
        if self.context.process.backend is None:
            raise Conflict(
                "Cannot shard a model with FSDP.",
                "This run has one process and no launcher started it; sharding needs a launcher.",
                "Start the script with `accel launch --num_processes N`.",
            )
        if plain_value(self.config, "state_dict_type") == "LOCAL_STATE_DICT":
            raise NotOffered(
                "Cannot use state_dict_type='LOCAL_STATE_DICT'.",
                "It stores flat shards, which only a run with the same ParallelismConfig can read.",
                "Use 'SHARDED_STATE_DICT', which loads on any number of processes.",
            )
        for model in bundle.models:
            if not self.arrives_sharded(model):
                blocks_to_shard(model, self.config.policy_for(model))
                weights.check_weights(model, self.config, self.context.process.rank)
        for optimizer in bundle.optimizers:
            model = owner(optimizer, [*bundle.models, *self._sharded])
            if not self.arrives_sharded(model) or model in self._sharded:
                check_shardable(optimizer, whole=self.version > 1)

    def transforms(self) -> Iterable[Transform]:
        config = self.config
        if not (config.activation_checkpointing or config.activation_checkpointing_offload):
            return ()
        offload = bool(config.activation_checkpointing_offload)

        def blocks(model: Module) -> list[Module]:
            return blocks_to_shard(model, config.policy_for(model)) or repeated_blocks(model)

        return (ActivationCheckpoint(blocks, offload),)

    def place(self, model: Module) -> Module:
        weights.to_device(model, self.context.process.device, self.config.param_init_fn)
        return model

    def arrives_sharded(self, model: Module) -> bool:
        """Whether a model was sharded before `prepare`."""
        return arrives_sharded(model, submesh(self.context.mesh, Axis.TENSOR))

    def names_of_ignored(self, model: Module) -> set[str]:
        """Names of the parameters that are not sharded, before sharding renames submodules."""
        ignored = ignored_parameters(model, self.config.ignored_modules)
        return {canonical_name(name) for name, parameter in model.named_parameters() if parameter in ignored}

    def average_ignored(self, model: Module, names: Collection[str]) -> None:
        """Average the gradients of parameters of a sharded model that are not sharded."""
        # Sharding renames submodules, and replaces all parameters of a model that was built in shards.
        unsharded = [one for name, one in model.named_parameters() if canonical_name(name) in names]
        transport = self.context.process.transport
        self.unreduced[model] = UnreducedGradients(model, unsharded, transport, self.reduces_of(model), replaces=True)

    def reduces_of(self, model: Module) -> Callable[[], bool]:
        """A function that returns whether backward of a model reduces gradients; it does not keep the model alive."""
        referred = weakref.ref(model)

        def reduces() -> bool:
            model = referred()
            return model is not None and self.reduces_gradients(model)

        return reduces

    def record(self, bundle: Bundle, ties: Iterable[list[list[str]]]) -> None:
        """Record the sharded models of a bundle with their ties, and the model of each of its optimizers."""
        named = [[[canonical_name(name) for name in names] for names in groups] for groups in ties]
        self._ties.update(zip(bundle.models, named, strict=True))
        self._sharded.update(bundle.models)
        for optimizer in bundle.optimizers:
            self._owners[optimizer] = owner(optimizer, list(self._sharded))

    # ------------------------------------------------------------------ one step

    def no_sync(self, model: Module) -> AbstractContextManager[None]:
        return _Reducing(self, model, False)

    def sync_in_next_backward(self, model: Module) -> AbstractContextManager[None]:
        return _Reducing(self, model, True)

    def reduces_gradients(self, model: Module) -> bool:
        """Whether backward of a sharded model reduces gradients; torch's wrapper keeps this state."""
        raise NotImplementedError

    def reduce_gradients(self, model: Module, reduces: bool) -> None:
        """Set whether backward of a model reduces gradients, or accumulates full ones."""
        raise NotImplementedError

    def reshard(self, model: Module) -> None:
        weights.reshard(model)

    # ------------------------------------------------------------------ checkpoints

    @property
    def full_to_host(self) -> bool:
        """Whether full states are assembled only on the first process, in host memory."""
        return True

    @property
    def optimizer_to_host(self) -> bool:
        """The same for full optimizer states."""
        return self.full_to_host

    @property
    def _full(self) -> bool:
        return bool(plain_value(self.config, "state_dict_type") == "FULL_STATE_DICT")

    def collect(self, kind: ObjectKind, item: Any) -> Any:
        if self._saving_group is None and not self._full:
            self._saving_group = torch.distributed.new_group(backend="gloo")
        if kind is ObjectKind.MODEL:
            return self._model_state(item, full=self._full)
        if kind is ObjectKind.OPTIMIZER:
            inner = inner_optimizer(item)
            model = self._owners[inner]
            return weights.optimizer_state(model, inner, full=self._full, to_host=self.optimizer_to_host)
        return super().collect(kind, item)

    def save(self, kind: ObjectKind, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
        if kind in (ObjectKind.MODEL, ObjectKind.OPTIMIZER):
            first, group = self.context.process.rank == 0, self._saving_group
            plans = self._save_plans.setdefault((kind, index), SavePlans())
            weights.write(kind, state, folder, index, full=self._full, first=first, plans=plans, group=group)
        elif self.context.process.rank == 0:
            super().save(kind, state, folder, index, safe_serialization=safe_serialization)

    def load(self, kind: ObjectKind, item: Any, folder: Path, index: int, **options: Any) -> None:
        if kind is ObjectKind.MODEL:
            weights.load_model(item, folder, index, strict=options.get("strict", True))
        elif kind is ObjectKind.OPTIMIZER:
            inner = inner_optimizer(item)
            weights.load_optimizer(self._owners[inner], inner, folder, index)
        else:
            super().load(kind, item, folder, index, **options)

    def state_dict(self, model: Module) -> dict[str, Tensor]:
        return self._model_state(model, full=True)

    def _model_state(self, model: Module, *, full: bool) -> dict[str, Any]:
        return weights.model_state(model, full=full, to_host=self.full_to_host, ties=self._ties.get(model, ()))

    def load_weights(self, model: Module, weights: Mapping[str, Tensor], strict: bool = True) -> None:
        put_full_weights(model, weights, strict=strict)

    def writes_weights(self) -> bool:
        return self.context.process.rank == 0

    # ------------------------------------------------------------------ the end

    def release(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        super().release(models, optimizers)
        self._sharded.difference_update(models)
        for optimizer in optimizers:
            self._owners.pop(inner_optimizer(optimizer), None)

    def close(self) -> None:
        for plans in self._save_plans.values():
            plans.forget()
        self._save_plans.clear()
        group, self._saving_group = self._saving_group, None
        if group is not None and torch.distributed.is_initialized():
            # The group may already be destroyed, together with all groups.
            with suppress(ValueError):
                torch.distributed.destroy_process_group(group)


def owner(optimizer: Optimizer, models: Sequence[Module]) -> Module:
    """The model of an optimizer's parameters.

    Raises:
        Conflict: the optimizer has parameters of several of the models, or of none.
    """
    held: set[Parameter] = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for model in models:
        if held <= set(model.parameters()):
            return model
    raise Conflict(
        f"Cannot prepare {type(optimizer).__name__}.",
        "Sharding replaces parameters, and the optimizer's parameters do not all belong to one model of this call.",
        "Prepare each optimizer together with its model, or create one for each model that prepare() returned.",
    )


class _Reducing:
    """A context in which backward reduces gradients, or accumulates full ones; may be nested."""

    __slots__ = ("_before", "_model", "_reduces", "_strategy")

    def __init__(self, strategy: ShardedStrategy, model: Module, reduces: bool) -> None:
        self._strategy, self._model, self._reduces = strategy, model, reduces

    def __enter__(self) -> None:
        self._before = self._strategy.reduces_gradients(self._model)
        self._strategy.reduce_gradients(self._model, self._reduces)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._strategy.reduce_gradients(self._model, self._before)
