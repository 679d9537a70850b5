"""DeepSpeed's engines: created from models, optimizers and schedulers; their steps, gradients, weights and checkpoints.

An engine writes its own files, in folders with the names that the original library uses. DeepSpeed is imported where a
function needs it, because scripts name the classes of this module also without it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from accel_ops import recursively_apply
from accel_ops.agreement import raise_on_any_rank
from accel_plugins.checkpoint import pickled
from accel_plugins.deepspeed.config import (
    AUTO_ENTRY,
    OFFLOADING,
    AutoValue,
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    fill_auto,
    refuse_auto,
)
from accel_plugins.deepspeed.manifest import REQUIREMENT
from accel_plugins.parameters import canonical_name
from accel_plugins.wrapped.optimizer import EngineSteppedOptimizer
from accel_plugins.wrapped.scheduler import AcceleratedScheduler
from accel_state.errors import CheckpointError, Conflict, NotOffered, NotReady, SettingError
from accel_state.settings.schema import import_object

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from accel_plugins.bundle import Bundle
    from accel_plugins.deepspeed.ulysses import Ulysses
    from accel_state.current import Process
    from accel_state.gradient import GradientState

__all__ = (
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "Started",
    "batch_values",
    "before_each_update",
    "check_placeholders",
    "end",
    "full_gradients",
    "full_weights",
    "gathered",
    "is_engine",
    "load_engine",
    "map_pytorch_optim_to_deepspeed",
    "parameters_behind",
    "put_engine_weights",
    "start",
    "tag_of",
)


def is_engine(model: object) -> bool:
    """Whether an object is an engine of DeepSpeed."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    return isinstance(model, DeepSpeedEngine)


# ---------------------------------------------------------------- creating engines
_PERSISTENT_PER_HIDDEN_UNIT: Final = 10
_PREFETCHED_FRACTION: Final = 0.9
_WARMUP_STEPS_ENTRY: Final = "scheduler.params.warmup_num_steps"


class Started(NamedTuple):
    """An engine with its optimizer and scheduler.

    Args:
        engine: replaces the model.
        optimizer: the engine's optimizer, or None.
        scheduler: the scheduler that the engine steps, or None.
    """

    engine: Any
    optimizer: Any
    scheduler: Any


def start(
    plugin: DeepSpeedPlugin,
    bundle: Bundle,
    dtype: torch.dtype | None,
    sizes: Iterable[AutoValue],
    ulysses: Ulysses | None = None,
) -> Started:
    """Complete the configuration and create the engine; called on every process.

    Args:
        plugin: the configuration; its "auto" values are replaced.
        bundle: one model, at most one optimizer, its schedulers, and prepared loaders.
        dtype: the dtype of the engine's parameters, to which inputs are converted; None: they are unchanged.
        sizes: the batch sizes, from `batch_values`.
        ulysses: shards the sequences of the model; None: they are not sharded.

    Raises:
        SettingError: the configuration is incomplete.
        Conflict: it contradicts the prepared objects, or the model's sequences cannot be sharded.
        NotOffered: DeepSpeed has no such optimizer for host memory, or does not shard sequences of such a model.
    """
    import deepspeed

    (model,) = bundle.models
    ds_config = plugin.hf_ds_config
    fill_auto(ds_config, sizes)
    fill_auto(ds_config, [AutoValue(*row, "default", binding=False) for row in _suggestions(bundle).items()])
    if ds_config.get_value(_WARMUP_STEPS_ENTRY) == 0:
        # A warm-up of 1 means none; DeepSpeed 0.19.6 and newer refuse 0, which older versions accept.
        ds_config.set_value(_WARMUP_STEPS_ENTRY, 1)
    if bundle.optimizers:
        refuse_auto(ds_config)
    plugin.set_moe_leaf_modules(model)
    arguments = _optimizer(plugin, bundle)
    stepped = [scheduler for scheduler in bundle.schedulers if _is_stepped_by_engine(scheduler)]
    for scheduler in stepped:
        own = scheduler.lr_scheduler_callable if isinstance(scheduler, DummyScheduler) else scheduler
        arguments |= {} if own is None else {"lr_scheduler": own}
    table = copy.deepcopy(plugin.deepspeed_config)
    if not bundle.optimizers:
        for entry in ("optimizer", "scheduler"):
            table.pop(entry, None)
    if ulysses is not None:
        arguments["mpu"] = ulysses.shard(model, int(plugin.get_value("train_micro_batch_size_per_gpu")))
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config=table, **arguments)
    if dtype is not None:
        _cast_inputs(engine, dtype)
    return Started(engine, optimizer, scheduler if stepped else None)


def _is_stepped_by_engine(scheduler: Any) -> bool:
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

    return isinstance(scheduler, DummyScheduler) or type(scheduler).__name__ in VALID_LR_SCHEDULES


def check_placeholders(plugin: DeepSpeedPlugin, bundle: Bundle) -> None:
    """Raise if object and configuration both describe an optimizer or scheduler, or neither does.

    Raises:
        Conflict: an object and the configuration describe it.
        SettingError: neither describes it.
    """
    for optimizer in bundle.optimizers:
        _check_one(plugin, "optimizer", optimizer, isinstance(optimizer, DummyOptim), "DummyOptim")
    own = any(isinstance(optimizer, DummyOptim) for optimizer in bundle.optimizers)
    for scheduler in bundle.schedulers:
        placeholder = isinstance(scheduler, DummyScheduler)
        if own and not placeholder and not isinstance(getattr(scheduler, "optimizer", None), DummyOptim):
            raise Conflict(
                f"Cannot prepare {type(scheduler).__name__} together with a DummyOptim.",
                "DeepSpeed creates the optimizer, but this scheduler changes another one.",
                "Pass DummyScheduler(optimizer, lr_scheduler_callable=...); the callable receives DeepSpeed's "
                "optimizer.",
            )
        if not placeholder or scheduler.lr_scheduler_callable is None:
            _check_one(plugin, "scheduler", scheduler, placeholder, "DummyScheduler")


def _check_one(plugin: DeepSpeedPlugin, entry: str, item: Any, placeholder: bool, dummy: str) -> None:
    described = isinstance(plugin.get_value(entry), dict)
    failure = f"Cannot prepare {type(item).__name__} with this DeepSpeed configuration."
    if described and not placeholder:
        raise Conflict(
            failure,
            f'The configuration describes the {entry} too (entry "{entry}").',
            f'Pass accel_plugins.deepspeed.config.{dummy}, or remove the entry "{entry}".',
        )
    if placeholder and not described:
        raise SettingError(
            failure,
            f'The configuration has no entry "{entry}" that describes it.',
            f'Add "{entry}" to the configuration, or pass a real one.',
        )


def _optimizer(plugin: DeepSpeedPlugin, bundle: Bundle) -> dict[str, Any]:
    if not bundle.optimizers:
        return {}
    (optimizer,) = bundle.optimizers
    if isinstance(optimizer, DummyOptim):
        return {"model_parameters": optimizer.param_groups}
    if plugin.offload_optimizer_device in OFFLOADING and plugin.get_value("zero_force_ds_cpu_optimizer", True):
        mapped = map_pytorch_optim_to_deepspeed(optimizer)
        for scheduler in bundle.schedulers:
            if getattr(scheduler, "optimizer", None) is optimizer:
                _follow(scheduler, mapped)
        return {"optimizer": mapped}
    return {"optimizer": optimizer}


def _follow(scheduler: Any, optimizer: Any) -> None:
    """Attach a torch scheduler to another optimizer, so that torch does not warn about missed steps."""
    inner = optimizer.step

    def step(*arguments: Any, **named: Any) -> Any:
        optimizer._opt_called = True
        return inner(*arguments, **named)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step
    scheduler.optimizer = optimizer


_HOST_OPTIMIZERS: Final = {
    "AdamW": (
        "deepspeed.ops.adam:DeepSpeedCPUAdam",
        {"adamw_mode": True},
        ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    ),
    "Adam": (
        "deepspeed.ops.adam:DeepSpeedCPUAdam",
        {"adamw_mode": False},
        ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    ),
    "Adagrad": ("deepspeed.ops.adagrad:DeepSpeedCPUAdagrad", {}, ("lr", "eps", "weight_decay")),
    "Lion": ("deepspeed.ops.lion:DeepSpeedCPULion", {}, ("lr", "betas", "weight_decay")),
}
"""For each class of a torch or bitsandbytes optimizer: DeepSpeed's class, its options, and the options to copy."""


def map_pytorch_optim_to_deepspeed(optimizer: Optimizer) -> Optimizer:
    """The equivalent DeepSpeed optimizer that steps in host memory; it has the same groups of parameters.

    Raises:
        NotOffered: DeepSpeed has no equivalent optimizer.

    Example:
        >>> type(map_pytorch_optim_to_deepspeed(torch.optim.AdamW(model.parameters()))).__name__
        'DeepSpeedCPUAdam'
    """
    name = type(optimizer).__name__
    if name.startswith("DeepSpeed"):
        return optimizer
    kind = name.removesuffix("8bit").removesuffix("32bit")
    if kind not in _HOST_OPTIMIZERS:
        raise NotOffered(
            f"Cannot use {name} while DeepSpeed stores optimizer states in host memory.",
            f"In host memory, DeepSpeed supports {', '.join(_HOST_OPTIMIZERS)} only.",
            "Use one of them, or set zero_force_ds_cpu_optimizer=false in the DeepSpeed configuration.",
        )
    target, options, taken = _HOST_OPTIMIZERS[kind]
    optimizer_class = import_object(target)
    defaults = {name: optimizer.defaults[name] for name in taken if name in optimizer.defaults}
    mapped: Optimizer = optimizer_class(optimizer.param_groups, **defaults, **options)
    return mapped


def _cast_inputs(engine: DeepSpeedEngine, dtype: torch.dtype) -> None:
    """Convert floating-point inputs to the dtype of the parameters, which DeepSpeed itself does not do."""

    def cast(module: Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return recursively_apply(lambda tensor: tensor.to(dtype), (arguments, named), test_type=_is_floating)

    engine.module.register_forward_pre_hook(cast, with_kwargs=True)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def batch_values(
    plugin: DeepSpeedPlugin, bundle: Bundle, shards: int, steps: int, together: int = 1, seen: Iterable[Any] = ()
) -> list[AutoValue]:
    """Batch sizes, from prepared loaders.

    Args:
        plugin: the configuration.
        bundle: its loaders have the number of samples of a global batch.
        shards: the number of shards of a global batch.
        steps: micro-batches per optimizer step.
        together: number of processes that together compute the batch of each of them, one batch after another.
        seen: loaders that were prepared earlier, for a model that is prepared without one.

    Raises:
        SettingError: neither a loader nor the configuration has the size.
    """
    micro = plugin.get_value("train_micro_batch_size_per_gpu", AUTO_ENTRY)
    if micro == AUTO_ENTRY:
        sizes = _sizes(bundle.loaders, shards) or _sizes(seen, shards)
        if not sizes and bundle.optimizers:
            raise SettingError(
                "Cannot start DeepSpeed.",
                "The batch size is not known: prepare() received no loader with a batch size, and the configuration "
                "does not set it.",
                "Prepare the training loader in the same call, or set train_micro_batch_size_per_gpu.",
            )
        # A model that is only evaluated accepts batches of any size.
        micro = (min if plugin.is_train_batch_min else max)(sizes or [1])
    counted = shards // together
    total = int(micro) * steps * counted
    return [
        AutoValue("gradient_accumulation_steps", steps, f"gradient_accumulation_steps={steps}", True),
        AutoValue("train_micro_batch_size_per_gpu", int(micro), "the loaders passed to prepare()", True, False),
        AutoValue("train_batch_size", total, f"{micro} samples x {steps} micro-batches x {counted} processes"),
    ]


def _sizes(loaders: Iterable[Any], shards: int) -> list[int]:
    return [size // shards for loader in loaders if (size := getattr(loader, "total_batch_size", None))]


def _suggestions(bundle: Bundle) -> dict[str, Any]:
    """Values by entry: learning rates and schedules from placeholders, and sizes of ZeRO stage 3 from the model."""
    zero = "zero_optimization"
    values: dict[str, Any] = {
        "gradient_clipping": 1.0,
        f"{zero}.stage3_gather_16bit_weights_on_model_save": False,
        f"{zero}.offload_optimizer.device": "none",
        f"{zero}.offload_param.device": "none",
    }
    for model in bundle.models:
        if (hidden := _hidden_size(getattr(model, "config", None))) is not None:
            values[f"{zero}.reduce_bucket_size"] = hidden * hidden
            values[f"{zero}.stage3_prefetch_bucket_size"] = int(_PREFETCHED_FRACTION * hidden * hidden)
            values[f"{zero}.stage3_param_persistence_threshold"] = _PERSISTENT_PER_HIDDEN_UNIT * hidden
    for optimizer in bundle.optimizers:
        if isinstance(optimizer, DummyOptim):
            values["optimizer.params.lr"] = optimizer.lr
            values["optimizer.params.weight_decay"] = optimizer.weight_decay
    for scheduler in bundle.schedulers:
        if isinstance(scheduler, DummyScheduler):
            values["scheduler.params.warmup_min_lr"] = 0
            values["scheduler.params.warmup_max_lr"] = getattr(scheduler.optimizer, "lr", None)
            values[_WARMUP_STEPS_ENTRY] = scheduler.warmup_num_steps
            values["scheduler.params.total_num_steps"] = scheduler.total_num_steps
    return {entry: value for entry, value in values.items() if value is not None}


def _hidden_size(config: Any) -> int | None:
    """The hidden size of a model, from its transformers configuration."""
    if config is None:
        return None
    size = getattr(config, "hidden_size", None)
    if size is None and getattr(config, "hidden_sizes", None):
        size = max(config.hidden_sizes)
    return _hidden_size(getattr(config, "text_config", None)) if size is None else int(size)


# ---------------------------------------------------------------- steps and weights
class DeepSpeedEngineWrapper:
    """Runs backward and, at the end of an accumulation window, the full optimizer step.

    Args:
        engine: the engine of `deepspeed.initialize`.

    Attributes:
        client_state: the argument of `save_state(client_state=...)`, after a checkpoint was loaded.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.client_state: dict[str, Any] = {}

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients; with `sync_gradients`, also reduce and clip them, step, and advance the schedule.

        Args:
            loss: the loss, not divided by the number of micro-batches, because the engine divides it.
            sync_gradients: whether this is the last micro-batch of its window.
            kwargs: further arguments of the engine's `backward`.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """Total gradient norm of the last step, before clipping; None before the first step."""
        norm = self.engine.get_global_grad_norm()
        return float(norm) if hasattr(norm, "item") else norm


class DeepSpeedOptimizerWrapper(EngineSteppedOptimizer):
    """An optimizer that the engine steps during backward; see `EngineSteppedOptimizer`."""

    engine = "DeepSpeed"
    steps_when = "during backward"

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that the engine steps; its own `step` does nothing.

    Args:
        scheduler: the engine's scheduler.
        optimizers: its optimizers.
    """

    def __init__(
        self, scheduler: Any, optimizers: Optimizer | Iterable[Optimizer], gradient: GradientState | None = None
    ) -> None:
        super().__init__(scheduler, optimizers, gradient=gradient, processes=1)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine has already stepped it."""


def before_each_update(engine: DeepSpeedEngine, notify: Callable[[DeepSpeedEngine], None]) -> None:
    """Call a function before each engine step that updates parameters, when gradients are reduced."""
    step = engine.step

    def announced(*arguments: Any, **named: Any) -> Any:
        if engine.is_gradient_accumulation_boundary():
            notify(engine)
        return step(*arguments, **named)

    engine.step = announced


def parameters_behind(loss: Tensor) -> set[int]:
    """Ids of the parameters from which a loss was computed."""
    reached: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        waiting += [before for before, _ in node.next_functions]
    return reached


def full_gradients(engine: Any) -> dict[str, Tensor]:
    """The gradients of an engine's step, before clipping; called on every process, between backward and step.

    Parameters that forward did not use have zero gradients.
    """
    from deepspeed.utils import safe_get_full_grad

    gradients = {}
    for name, parameter in engine.module.named_parameters():
        gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
        if gradient is not None:
            gradients[canonical_name(name)] = gradient.detach().clone()
    return gradients


def full_weights(engine: Any) -> dict[str, Tensor]:
    """All weights of an engine's model, on the writing process; called on every process.

    Raises:
        NotReady: the weights are sharded, and the settings do not gather them.
    """
    if int(engine.zero_optimization_stage()) < 3:
        weights: dict[str, Tensor] = engine.module.state_dict()
        return weights
    if not engine.zero_gather_16bit_weights_on_model_save():
        raise NotReady(
            "Cannot read the weights of a model that ZeRO stage 3 shards.",
            "The settings do not gather them when the model is saved.",
            "Set DeepSpeedPlugin(zero3_save_16bit_model=True), or use the script zero_to_fp32.py on a checkpoint.",
        )
    gathered: dict[str, Tensor] | None = engine._zero3_consolidated_16bit_state_dict()
    return gathered or {}


def put_engine_weights(engine: Any, weights: Mapping[str, Tensor], strict: bool) -> None:
    """Load full weights into an engine's model, and into the copies of its optimizer.

    Raises:
        NotOffered: parameters are sharded.
    """
    if int(engine.zero_optimization_stage()) >= 3:
        raise NotOffered(
            "Cannot load weights into a model that ZeRO stage 3 shards.",
            "DeepSpeed loads weights only while the model is created, or from its own checkpoints.",
            "Load the weights before prepare().",
        )
    engine.module.load_state_dict(weights, strict=strict)
    refresh = getattr(engine.optimizer, "refresh_fp32_params", None)
    if refresh is not None:
        refresh()


def gathered(
    parameters: Any, modifier_rank: int | None = None, forward_module: Any = None, enabled: bool = True
) -> AbstractContextManager[None]:
    """A context that gathers parameters that DeepSpeed shards; it has no effect if none are sharded.

    Args:
        parameters: one or several.
        modifier_rank: the rank of the process from which changes are broadcast; None: nothing is changed.
        forward_module: the module that uses them in forward, if it does not own them.
        enabled: False: no effect.

    Raises:
        Missing: parameters are sharded, and DeepSpeed is not installed.
    """
    single = hasattr(parameters, "shape")
    listed = [parameters] if single else list(parameters)
    if not any(hasattr(parameter, "ds_id") for parameter in listed):
        return nullcontext()
    REQUIREMENT.demand("Cannot gather parameters that DeepSpeed shards.")
    import deepspeed

    whole: AbstractContextManager[None] = deepspeed.zero.GatheredParameters(
        listed, modifier_rank, forward_module, enabled
    )
    return whole


def end(engine: DeepSpeedEngine) -> None:
    """Free the memory of an engine."""
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    inside = set(engine.modules())
    engine.destroy()
    # ZeRO stage 3 stores every sharded model in a list, and in caches of methods (seen in 0.19.8).
    sharded = getattr(parameter_offload, "FWD_MODULE_STACK", [])
    sharded[:] = [module for module in sharded if module not in inside]
    for method in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


# ---------------------------------------------------------------- checkpoints

_LOAD_OPTIONS: Final = (
    "strict",
    "load_module_strict",
    "load_optimizer_states",
    "load_lr_scheduler_states",
    "load_module_only",
    "custom_load_fn",
)
"""Options of `load_state` that DeepSpeed's `load_checkpoint` takes; "strict" is `load_module_strict`."""

_UNIVERSAL_SUFFIX: Final = "_universal"
_UNIVERSAL_SETTING: Final = '"checkpoint": {"load_universal": true}'

_SHARD_FILE: Final = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_(optim|model)_states\.pt$")


def tag_of(index: int) -> str:
    """Name of the folder for the model with this index."""
    return "pytorch_model" if index == 0 else f"pytorch_model_{index}"


def load_engine(engine: Any, folder: Path, index: int, process: Process, options: Mapping[str, Any]) -> dict[str, Any]:
    """Make an engine load the files that it saved; called on every process.

    DeepSpeed unpickles its files, so each is first checked by one process, without running code from it.

    Args:
        engine: an engine of DeepSpeed.
        folder: the checkpoint folder.
        index: index of the model.
        process: this process.
        options: options of `load_state`.

    Returns:
        The saved `client_state`.

    Raises:
        SettingError: DeepSpeed has no such option.
        CheckpointError: files are missing or damaged, contain code, or belong to another stage or number of processes.
    """
    unknown = sorted(options.keys() - set(_LOAD_OPTIONS))
    if unknown:
        raise SettingError(
            f"Cannot call load_state() with {', '.join(unknown)}.",
            "DeepSpeed has no such loading options.",
            f"Remove them; DeepSpeed has {', '.join(_LOAD_OPTIONS)}.",
        )
    place = folder / tag_of(index)
    if engine.load_universal_checkpoint():
        place = _universal(place)
    whole = not options.get("load_module_only") and options.get("load_optimizer_states", True)
    raise_on_any_rank(
        process,
        "deepspeed",
        lambda: _look_through(engine, place, process, bool(whole)),
        f"Cannot load the DeepSpeed checkpoint {place}.",
        error=CheckpointError,
    )
    arguments = {"load_module_strict" if name == "strict" else name: value for name, value in options.items()}
    path, client_state = engine.load_checkpoint(str(folder), place.name, **arguments)
    if path is None:
        raise CheckpointError(
            f"Cannot load the DeepSpeed checkpoint {place}.",
            "DeepSpeed did not find its files.",
            "Load an older checkpoint.",
        )
    return dict(client_state or {})


def _universal(place: Path) -> Path:
    """The folder that DeepSpeed's converter created from another.

    Raises:
        CheckpointError: there is no such folder.
    """
    for folder in (place.with_name(f"{place.name}{_UNIVERSAL_SUFFIX}"), place):
        if (folder / "zero").is_dir():
            return folder
    raise CheckpointError(
        f"Cannot load the universal DeepSpeed checkpoint of {place} (checkpoint.load_universal).",
        "The checkpoint was not converted.",
        f"Run: {_conversion(place)}",
    )


def _conversion(place: Path) -> str:
    """The command that creates a universal checkpoint."""
    return (
        f"python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {place} "
        f"--output_folder {place}{_UNIVERSAL_SUFFIX}"
    )


def _look_through(engine: Any, place: Path, process: Process, optimizer: bool) -> None:
    """Raise for files that do not fit or contain code; each is read by one process.

    Args:
        engine: the engine that will load them.
        place: their folder.
        process: this process.
        optimizer: whether optimizer states will be loaded too.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    # DeepSpeed's files have these classes, besides tensors and plain data.
    allowed: list[Any] = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
    failure = f"Cannot load the DeepSpeed checkpoint {place}."
    files = sorted(place.rglob("*.pt")) if place.is_dir() else []
    if not files:
        raise CheckpointError(failure, "The folder with DeepSpeed's files does not exist.", "Use another checkpoint.")
    ours = int(engine.zero_optimization_stage())
    anything_fits = engine.load_universal_checkpoint() or not (optimizer or ours == 3)
    if not anything_fits:
        _check_writers(failure, place, files, ours, process.world_size)
    for file in files[process.rank :: process.world_size]:
        with torch.serialization.safe_globals(allowed):
            state = pickled.read(file, map_location="meta")
        part = _SHARD_FILE.search(file.name)
        if part and part[2] == "optim" and not anything_fits:
            _check_stage(failure, place, state, ours)


def _check_writers(failure: str, place: Path, files: Sequence[Path], ours: int, processes: int) -> None:
    parts = [part for file in files if (part := _SHARD_FILE.search(file.name))]
    writers = {part[1] for part in parts}
    if writers and len(writers) != processes:
        raise CheckpointError(
            failure,
            f"It was written by {len(writers)} processes, and these are {processes}.",
            f"Start {len(writers)} processes, or convert it by {_conversion(place)} and load it with "
            f"{_UNIVERSAL_SETTING} in the configuration of DeepSpeed.",
        )
    if ours and not any(part[2] == "optim" for part in parts):
        raise _other_stage(failure, place, 0, ours)


def _check_stage(failure: str, place: Path, state: Any, ours: int) -> None:
    held = state.get("optimizer_state_dict") if isinstance(state, Mapping) else None
    stage = held.get("zero_stage") if isinstance(held, Mapping) else None
    if stage is not None and int(stage) != ours:
        raise _other_stage(failure, place, int(stage), ours)


def _other_stage(failure: str, place: Path, theirs: int, ours: int) -> CheckpointError:
    return CheckpointError(
        failure,
        f"It was written with ZeRO stage {theirs}, and this run has stage {ours}.",
        f"Use zero_stage={theirs}, convert it by {_conversion(place)} and load it with {_UNIVERSAL_SETTING} in the "
        "configuration of DeepSpeed, or extract only the weights with the script zero_to_fp32.py beside it.",
    )
