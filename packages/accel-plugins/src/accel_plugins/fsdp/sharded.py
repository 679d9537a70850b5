"""What both versions of FSDP have in common: blocks, what they refuse, where weights come from, and checkpoints."""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from accel_plugins.blocks import blocks_of_class, repeated_blocks
from accel_plugins.bundle import Bundle
from accel_plugins.checkpoint.sharded_save import SavePlans
from accel_plugins.context import Context
from accel_plugins.fsdp import weights
from accel_plugins.fsdp.building import arrives_sharded
from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.fsdp.weights import put_full_weights
from accel_plugins.manifest import Axis, Part
from accel_plugins.mesh import submesh
from accel_plugins.parameters import find_tied_parameters
from accel_plugins.strategy import Strategy
from accel_plugins.transform import Transform
from accel_plugins.transforms.activation_checkpoint import ActivationCheckpoint
from accel_plugins.wrapped.optimizer import inner_optimizer
from accel_state import current
from accel_state.errors import Conflict, NotOffered, SettingError
from accel_state.settings.schema import plain_value

__all__ = (
    "ShardedStrategy",
    "block_classes",
    "blocks_to_shard",
    "ignored_parameters",
    "named_policy",
    "offload",
    "owner",
    "shard_groups",
)


class ShardedStrategy(Strategy):
    """Shards parameters, gradients and optimizer state over the processes; a version says how.

    A version implements `shard`, which makes of a model on its device the one that trains.
    """

    version: ClassVar[int]
    config: FullyShardedDataParallelPlugin

    def __init__(self, context: Context, config: FullyShardedDataParallelPlugin) -> None:
        super().__init__(context, config)
        if config.fsdp_version != self.version:
            raise Conflict(
                f"Cannot use the backend 'fsdp{self.version}' with settings of version {config.fsdp_version}.",
                "Each version has its own backend and its own settings.",
                f"Use fsdp_version={self.version} (or FSDP_VERSION={self.version}), or remove the backend.",
            )
        config.compute_in(context.precision.dtype)
        loads_alone = "true" if config.cpu_ram_efficient_loading else "false"
        current.publish_for_run({"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": loads_alone})
        self._owners: weakref.WeakKeyDictionary[Optimizer, Module] = weakref.WeakKeyDictionary()
        self._sharded: weakref.WeakSet[Module] = weakref.WeakSet()
        self._ties: weakref.WeakKeyDictionary[Module, list[list[str]]] = weakref.WeakKeyDictionary()
        self._saving_group: torch.distributed.ProcessGroup | None = None
        self._save_plans: dict[tuple[Part, int], SavePlans] = {}
        self._holding: dict[int, int] = {}

    # ------------------------------------------------------------------ preparing

    def check(self, bundle: Bundle) -> None:
        if self.context.process.backend is None:
            raise Conflict(
                "Cannot shard a model with FSDP.",
                "This run has one process, and sharding needs a launcher.",
                "Start the script with `accel launch --num_processes N`.",
            )
        if plain_value(self.config, "state_dict_type") == "LOCAL_STATE_DICT":
            raise NotOffered(
                "Cannot use state_dict_type='LOCAL_STATE_DICT'.",
                "It holds flat shards, which only a run with the same ParallelismConfig can read.",
                "Use 'SHARDED_STATE_DICT', which loads on any number of processes.",
            )
        for model in bundle.models:
            blocks_to_shard(model, self.config)
            weights.check_weights(model, self.config, self.context.process.rank)
            if self.context.precision.scaler is not None and self._whole(model):
                raise NotOffered(
                    "Cannot train unsharded parameters in fp16 (ignored_modules).",
                    "torch's gradient scaler cannot unscale sharded gradients and whole ones together.",
                    "Train in bf16, or freeze the ignored modules.",
                )
        for optimizer in bundle.optimizers:
            owner(optimizer, [*bundle.models, *self._sharded])
            if optimizer.state:
                raise Conflict(
                    f"{type(optimizer).__name__} was given to prepare().",
                    "It has stepped before, and its state belongs to parameters that are not sharded yet.",
                    "Prepare it first, and load its state afterwards.",
                )

    def transforms(self) -> Iterable[Transform]:
        config = self.config
        if not (config.activation_checkpointing or config.activation_checkpointing_offload):
            return ()
        offload = bool(config.activation_checkpointing_offload)
        return (ActivationCheckpoint(lambda model: blocks_to_shard(model, config) or repeated_blocks(model), offload),)

    def place(self, model: Module) -> Module:
        weights.to_device(model, self.context.process.device, self.config.param_init_fn)
        return model

    def arrives_sharded(self, model: Module) -> bool:
        """Whether somebody has sharded a model before it came to `prepare`."""
        return arrives_sharded(model, submesh(self.context.mesh, Axis.TENSOR))

    def setup(self, bundle: Bundle) -> Bundle:
        before = bundle.parameter_names()
        for model in bundle.models:
            if self.arrives_sharded(model):
                continue
            if self.context.precision.dtype is not None:
                weights.train_in_fp32(model)
            for parameter in self._whole(model):
                hook = self._averaging_hook(model)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        # Parameters that FSDP 1 has joined do not show any more which are one.
        ties = [find_tied_parameters(model) for model in bundle.models]
        bundle.models[:] = [self.shard(model) for model in bundle.models]
        self._ties.update(zip(bundle.models, ties, strict=True))
        self._sharded.update(bundle.models)
        self.follow(bundle, before)
        for optimizer in bundle.optimizers:
            self._owners[optimizer] = owner(optimizer, list(self._sharded))
        return bundle

    def follow(self, bundle: Bundle, before: Mapping[Parameter, str]) -> None:
        """Make the optimizers hold the parameters that now train; `before` names those they hold."""
        bundle.rebind_by_name(before)

    def shard(self, model: Module) -> Module:
        """The model that trains, made of one on its device."""
        raise NotImplementedError

    def _whole(self, model: Module) -> list[Parameter]:
        """Parameters that train and are not sharded."""
        return [parameter for parameter in ignored_parameters(model, self.config) if parameter.requires_grad]

    def _averaging_hook(self, model: Module) -> Callable[[Tensor], None]:
        """Averages the gradient of a parameter that is not sharded, when gradients are synchronised.

        What earlier backwards have averaged is the same everywhere, so averaging it again changes nothing.
        """
        transport, holding, key = self.context.process.transport, self._holding, id(model)

        def average(parameter: Tensor) -> None:
            if not holding.get(key) and parameter.grad is not None:
                transport.all_reduce(parameter.grad).wait()
                parameter.grad /= transport.world_size

        return average

    # ------------------------------------------------------------------ checkpoints

    @property
    def whole_to_host(self) -> bool:
        """Whether whole states are put together in host memory of the first process, and nowhere else."""
        return True

    @property
    def optimizer_to_host(self) -> bool:
        """The same for whole states of optimizers."""
        return self.whole_to_host

    @property
    def _full(self) -> bool:
        return bool(plain_value(self.config, "state_dict_type") == "FULL_STATE_DICT")

    def collect(self, part: Part, item: Any) -> Any:
        if self._saving_group is None and not self._full:
            self._saving_group = torch.distributed.new_group(backend="gloo")
        if part is Part.MODEL:
            return self._model_state(item, full=self._full)
        if part is Part.OPTIMIZER:
            inner = inner_optimizer(item)
            model = self._owners[inner]
            return weights.optimizer_state(model, inner, full=self._full, to_host=self.optimizer_to_host)
        return super().collect(part, item)

    def save(self, part: Part, state: Any, folder: Path, index: int, *, safe_serialization: bool = True) -> None:
        if part in (Part.MODEL, Part.OPTIMIZER):
            first, group = self.context.process.rank == 0, self._saving_group
            plans = self._save_plans.setdefault((part, index), SavePlans())
            weights.write(part, state, folder, index, full=self._full, first=first, plans=plans, group=group)
        elif self.context.process.rank == 0:
            super().save(part, state, folder, index, safe_serialization=safe_serialization)

    def load(self, part: Part, item: Any, folder: Path, index: int, **options: Any) -> None:
        if part is Part.MODEL:
            weights.load_model(item, folder, index, strict=options.get("strict", True))
        elif part is Part.OPTIMIZER:
            inner = inner_optimizer(item)
            weights.load_optimizer(self._owners[inner], inner, folder, index)
        else:
            super().load(part, item, folder, index, **options)

    def state_dict(self, model: Module) -> dict[str, Tensor]:
        return self._model_state(model, full=True)

    def _model_state(self, model: Module, *, full: bool) -> dict[str, Any]:
        return weights.model_state(model, full=full, to_host=self.whole_to_host, ties=self._ties.get(model, ()))

    def load_weights(self, model: Module, weights: Mapping[str, Tensor], strict: bool = True) -> None:
        put_full_weights(model, weights, strict=strict)

    def writes_weights(self) -> bool:
        return self.context.process.rank == 0

    # ------------------------------------------------------------------ the end

    def release(self, models: Sequence[Module], optimizers: Sequence[Any]) -> None:
        self._sharded.difference_update(models)
        for optimizer in optimizers:
            self._owners.pop(inner_optimizer(optimizer), None)

    def close(self) -> None:
        self._save_plans.clear()
        group, self._saving_group = self._saving_group, None
        if group is not None and torch.distributed.is_initialized():
            # Whoever ended all groups has ended this one, too.
            with suppress(ValueError):
                torch.distributed.destroy_process_group(group)


def owner(optimizer: Optimizer, models: Sequence[Module]) -> Module:
    """The model whose parameters an optimizer holds.

    Raises:
        Conflict: it holds parameters of several of the models, or of none.
    """
    held: set[Parameter] = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for model in models:
        if held <= set(model.parameters()):
            return model
    raise Conflict(
        f"{type(optimizer).__name__} was given to prepare().",
        "Its parameters are not those of one sharded model or of one model of this call; sharding replaces parameters.",
        "Give each optimizer together with its model, or make it from what prepare() returned; one for each model.",
    )


# ---------------------------------------------------------------------- settings as torch takes them

_SIZE: Final = 100_000_000
"""Parameters that make a block when nothing was said, as launchers have it."""


class ShardingSettings(Protocol):
    """What is read of a `FullyShardedDataParallelPlugin`, whose module imports this one."""

    cpu_offload: Any
    ignored_modules: Any
    min_num_params: int | None
    transformer_cls_names_to_wrap: Any


def blocks_to_shard(model: Module, config: ShardingSettings) -> list[Module]:
    """The parts of a model that are sharded by themselves, the innermost first.

    Raises:
        SettingError: the classes of blocks are not known, or the model has none of them.
        NotOffered: a `CustomPolicy` gives some blocks arguments of their own.
    """
    policy = plain_value(config, "auto_wrap_policy")
    if isinstance(policy, str):
        policy = named_policy(model, config)
    if policy is None:
        return []
    if callable(policy):
        return _blocks_by_function(model, policy)
    chosen = policy._run_policy(model, ignored_modules=set(), root_kwargs={})
    if any(chosen.values()):
        raise NotOffered(
            "A CustomPolicy with arguments of their own for some blocks.",
            "Every block is sharded with the settings of the plugin.",
            "Let the function of the policy answer True or False.",
        )
    return [part for part in reversed(list(model.modules())) if part is not model and part in chosen]


def shard_groups(model: Module, config: ShardingSettings) -> list[Module]:
    """The blocks whose parameters are gathered together; those of no block are gathered with the whole model.

    Modules that share a parameter are in one group, because a group replaces the parameters of its own modules alone:
    a block that has some of them, and not all, belongs to the group around it.

    Raises:
        SettingError, NotOffered: as `blocks_to_shard`.
    """
    holders: dict[Parameter, set[Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(module)
    tied = [modules for modules in holders.values() if len(modules) > 1]
    blocks = blocks_to_shard(model, config)
    if not tied:
        return blocks
    inside = {block: set(block.modules()) for block in blocks}
    return [block for block in blocks if all(inside[block] >= one or not inside[block] & one for one in tied)]


def named_policy(model: Module, config: ShardingSettings) -> Callable[..., bool] | None:
    """Torch's policy for a model, of the name that the settings have; None for one that makes no blocks.

    Raises:
        SettingError: as `block_classes`.
    """
    name = plain_value(config, "auto_wrap_policy")
    if name == "TRANSFORMER_BASED_WRAP":
        return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=block_classes(model, config))
    least = _SIZE if config.min_num_params is None else config.min_num_params
    if name == "SIZE_BASED_WRAP" and least > 0:
        return functools.partial(size_based_auto_wrap_policy, min_num_params=least)
    return None


def block_classes(model: Module, config: ShardingSettings) -> set[type[Module]]:
    """The classes of blocks that the settings name, else those that the model names.

    Raises:
        SettingError: neither names any, or the model has none of them.
    """
    names = config.transformer_cls_names_to_wrap or tuple(getattr(model, "_no_split_modules", None) or ())
    if not names:
        raise SettingError(
            f"Shard blocks of {type(model).__name__} by class (TRANSFORMER_BASED_WRAP).",
            "Neither the settings nor the model name the classes.",
            "Give transformer_cls_names_to_wrap=['...'], or wrap by size.",
        )
    return {type(block) for block in blocks_of_class(model, names)}


def _blocks_by_function(model: Module, policy: Callable[..., bool]) -> list[Module]:
    """Blocks by a policy with torch's three arguments (module, recurse, nonwrapped_numel), or by one with a module.

    With three, parts of a module are looked at where the policy wants to recurse into it, and the module is a block by
    the parameters that are not in blocks inside of it.
    """
    if not _takes_torch_arguments(policy):
        return [part for part in reversed(list(model.modules())) if part is not model and policy(part)]
    blocks: list[Module] = []
    seen: set[Module] = set()

    def claimed(part: Module) -> int:
        """Number of parameters of a part that are in blocks."""
        seen.add(part)
        total = sum(parameter.numel() for parameter in part.parameters())
        if not policy(module=part, recurse=True, nonwrapped_numel=total):
            return 0
        inside = sum(claimed(child) for child in part.children() if child not in seen)
        if part is model or not policy(module=part, recurse=False, nonwrapped_numel=total - inside):
            return inside
        blocks.append(part)
        return total

    claimed(model)
    return blocks


def _takes_torch_arguments(policy: Callable[..., bool]) -> bool:
    try:
        inspect.signature(policy).bind(module=None, recurse=True, nonwrapped_numel=0)
    except (TypeError, ValueError):
        return False
    return True


def offload(config: ShardingSettings, pins_memory: bool) -> OffloadPolicy:
    """Where version 2 keeps parameters between uses; memory is pinned where the device can, by default."""
    policy = config.cpu_offload
    if not isinstance(policy, CPUOffloadPolicy):
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=policy.pin_memory and pins_memory)


def ignored_parameters(model: Module, config: ShardingSettings) -> set[Parameter]:
    """Parameters that stay whole on every process."""
    ignored = config.ignored_modules
    if ignored is None:
        return set()
    if isinstance(ignored, str):
        ignored = [part for name, part in model.named_modules() if re.fullmatch(ignored, name)]
    modules: Iterable[Any] = ignored
    return {parameter for module in modules for parameter in module.parameters()}
