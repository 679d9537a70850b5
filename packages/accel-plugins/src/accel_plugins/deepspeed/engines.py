"""DeepSpeed's engines: their "auto" values from models, optimizers and loaders, their gradients and checkpoints.

An engine writes its own files, in folders with the names that the original library uses.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import safe_get_full_grad
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor
from torch.nn import Module

from accel_ops import recursively_apply
from accel_ops.agreement import raise_on_any_rank
from accel_plugins.checkpoint import pickled
from accel_plugins.deepspeed.ds_config import AUTO_ENTRY, OFFLOADING, AutoValue, fill_auto, refuse_auto
from accel_plugins.deepspeed.objects import DummyOptim, DummyScheduler, map_pytorch_optim_to_deepspeed
from accel_plugins.parameters import canonical_name
from accel_state.current import Process
from accel_state.errors import CheckpointError, Conflict, NotOffered, NotReady, SettingError

if TYPE_CHECKING:
    from accel_plugins.bundle import Bundle
    from accel_plugins.context import Context
    from accel_plugins.deepspeed.config import DeepSpeedPlugin
    from accel_plugins.deepspeed.ulysses import Ulysses
    from accel_plugins.precision.base import Precision

__all__ = (
    "LOAD_OPTIONS",
    "Started",
    "batch_values",
    "before_each_update",
    "check_placeholders",
    "dtype_of",
    "end",
    "full_gradients",
    "full_weights",
    "is_engine",
    "load_engine",
    "object_values",
    "parameters_behind",
    "put_engine_weights",
    "save_engine",
    "start",
    "tag_of",
    "trains_in_fp16",
)

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


def is_engine(model: object) -> bool:
    """Whether an object is an engine of DeepSpeed."""
    return isinstance(model, DeepSpeedEngine)


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


def trains_in_fp16() -> bool:
    """Whether DeepSpeed trains in fp16 on this machine's devices."""
    return bool(get_accelerator().is_fp16_supported())


def dtype_of(precision: Precision) -> torch.dtype | None:
    """The dtype in which DeepSpeed stores parameters; None: unchanged."""
    return precision.dtype


def start(
    plugin: DeepSpeedPlugin,
    context: Context,
    bundle: Bundle,
    sizes: Iterable[AutoValue],
    ulysses: Ulysses | None = None,
) -> Started:
    """Complete the configuration and create the engine; called on every process.

    Args:
        plugin: the configuration; its "auto" values are replaced.
        context: the context of the run.
        bundle: one model, at most one optimizer, its schedulers, and prepared loaders.
        sizes: the batch sizes from `batch_values`.
        ulysses: shards the sequences of the model; None: they are not sharded.

    Raises:
        SettingError: the configuration is incomplete.
        Conflict: it contradicts the prepared objects, or the model's sequences cannot be sharded.
        NotOffered: DeepSpeed has no such optimizer for host memory, or does not shard sequences of such a model.
    """
    (model,) = bundle.models
    ds_config = plugin.hf_ds_config
    fill_auto(ds_config, sizes)
    fill_auto(ds_config, object_values(bundle))
    if ds_config.get_value(_WARMUP_STEPS_ENTRY) == 0:
        # A warm-up of 1 means none; DeepSpeed 0.19.6 and newer refuse 0, which older versions accept.
        ds_config.set_value(_WARMUP_STEPS_ENTRY, 1)
    if bundle.optimizers:
        refuse_auto(ds_config)
    plugin.set_moe_leaf_modules(model)
    arguments = {**_optimizer(plugin, bundle), **_scheduler(bundle)}
    table = copy.deepcopy(plugin.deepspeed_config)
    if not bundle.optimizers:
        for entry in ("optimizer", "scheduler"):
            table.pop(entry, None)
    if ulysses is not None:
        arguments["mpu"] = ulysses.shard(model, int(plugin.get_value("train_micro_batch_size_per_gpu")))
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config=table, **arguments)
    _cast_inputs(engine, context.precision)
    moved = [scheduler for scheduler in bundle.schedulers if _moves_by_engine(scheduler)]
    return Started(engine, optimizer, scheduler if moved else None)


def before_each_update(engine: DeepSpeedEngine, notify: Callable[[DeepSpeedEngine], None]) -> None:
    """Call a function before each engine step that updates parameters, when gradients are reduced."""
    step = engine.step

    def announced(*arguments: Any, **named: Any) -> Any:
        if engine.is_gradient_accumulation_boundary():
            notify(engine)
        return step(*arguments, **named)

    engine.step = announced


def full_gradients(engine: Any) -> dict[str, Tensor]:
    """The gradients of an engine's step, before clipping; called on every process, between backward and step.

    Parameters that forward did not use have zero gradients.
    """
    gradients = {}
    for name, parameter in engine.module.named_parameters():
        gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
        if gradient is not None:
            gradients[canonical_name(name)] = gradient.detach().clone()
    return gradients


def end(engine: DeepSpeedEngine) -> None:
    """Free the memory of an engine."""
    inside = set(engine.modules())
    engine.destroy()
    # ZeRO stage 3 stores every sharded model in a list, and in caches of methods (seen in 0.19.8).
    sharded = getattr(parameter_offload, "FWD_MODULE_STACK", [])
    sharded[:] = [module for module in sharded if module not in inside]
    for method in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


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


def _scheduler(bundle: Bundle) -> dict[str, Any]:
    """A scheduler that the engine steps and that its configuration does not describe."""
    for scheduler in bundle.schedulers:
        if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is not None:
            return {"lr_scheduler": scheduler.lr_scheduler_callable}
        if type(scheduler).__name__ in VALID_LR_SCHEDULES:
            return {"lr_scheduler": scheduler}
    return {}


def _moves_by_engine(scheduler: Any) -> bool:
    return isinstance(scheduler, DummyScheduler) or type(scheduler).__name__ in VALID_LR_SCHEDULES


def _cast_inputs(engine: Any, precision: Precision) -> None:
    """Convert floating-point inputs to the dtype of the parameters, which DeepSpeed itself does not do."""
    dtype = dtype_of(precision)
    if dtype is None:
        return

    def cast(module: Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return recursively_apply(lambda tensor: tensor.to(dtype), (arguments, named), test_type=_is_floating)

    engine.module.register_forward_pre_hook(cast, with_kwargs=True)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


_PERSISTENT_PER_HIDDEN_UNIT: Final = 10
_PREFETCHED_FRACTION: Final = 0.9


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
            f'Pass accel_plugins.deepspeed.objects.{dummy}, or remove the entry "{entry}".',
        )
    if placeholder and not described:
        raise SettingError(
            failure,
            f'The configuration has no entry "{entry}" that describes it.',
            f'Add "{entry}" to the configuration, or pass a real one.',
        )


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


def object_values(bundle: Bundle) -> Iterator[AutoValue]:
    """Values for learning rates and schedules from placeholders, and for sizes of ZeRO stage 3 from the model."""
    yield _suggestion("gradient_clipping", 1.0)
    yield _suggestion("zero_optimization.stage3_gather_16bit_weights_on_model_save", False)
    for what in ("optimizer", "param"):
        yield _suggestion(f"zero_optimization.offload_{what}.device", "none")
    for model in bundle.models:
        yield from _model_values(model)
    for optimizer in bundle.optimizers:
        if isinstance(optimizer, DummyOptim):
            yield _suggestion("optimizer.params.lr", optimizer.lr)
            yield _suggestion("optimizer.params.weight_decay", optimizer.weight_decay)
    for scheduler in bundle.schedulers:
        if isinstance(scheduler, DummyScheduler):
            yield from _schedule_values(scheduler)


def _schedule_values(scheduler: DummyScheduler) -> Iterator[AutoValue]:
    yield _suggestion("scheduler.params.warmup_min_lr", 0)
    rate = getattr(scheduler.optimizer, "lr", None)
    if rate is not None:
        yield _suggestion("scheduler.params.warmup_max_lr", rate)
    yield _suggestion("scheduler.params.warmup_num_steps", scheduler.warmup_num_steps)
    if scheduler.total_num_steps is not None:
        yield _suggestion("scheduler.params.total_num_steps", scheduler.total_num_steps)


def _model_values(model: Module) -> Iterator[AutoValue]:
    hidden = _hidden_size(getattr(model, "config", None))
    if hidden is None:
        return
    yield _suggestion("zero_optimization.reduce_bucket_size", hidden * hidden)
    yield _suggestion("zero_optimization.stage3_prefetch_bucket_size", int(_PREFETCHED_FRACTION * hidden * hidden))
    yield _suggestion("zero_optimization.stage3_param_persistence_threshold", _PERSISTENT_PER_HIDDEN_UNIT * hidden)


def _suggestion(key: str, value: Any) -> AutoValue:
    return AutoValue(key, value, "default", binding=False)


def _hidden_size(config: Any) -> int | None:
    """The hidden size of a model, from its transformers configuration."""
    if config is None:
        return None
    size = getattr(config, "hidden_size", None)
    if size is None and getattr(config, "hidden_sizes", None):
        size = max(config.hidden_sizes)
    return _hidden_size(getattr(config, "text_config", None)) if size is None else int(size)


# ---------------------------------------------------------------------------- checkpoints

LOAD_OPTIONS: Final = {
    "strict": "load_module_strict",
    "load_module_strict": "load_module_strict",
    "load_optimizer_states": "load_optimizer_states",
    "load_lr_scheduler_states": "load_lr_scheduler_states",
    "load_module_only": "load_module_only",
    "custom_load_fn": "custom_load_fn",
}
"""Options of DeepSpeed's `load_checkpoint`, by their names in `load_state`."""

_ALLOWED_CLASSES: Final = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)
"""Classes in DeepSpeed's files, besides tensors and plain data."""

_UNIVERSAL_SUFFIX: Final = "_universal"
_UNIVERSAL_SETTING: Final = '"checkpoint": {"load_universal": true}'

_SHARD_FILE: Final = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_(optim|model)_states\.pt$")


def tag_of(index: int) -> str:
    """Name of the folder for the model with this index."""
    return "pytorch_model" if index == 0 else f"pytorch_model_{index}"


def save_engine(engine: Any, folder: Path, index: int, options: Mapping[str, Any]) -> None:
    """Make an engine write its model, optimizer and schedule; called on every process.

    Args:
        engine: an engine of DeepSpeed.
        folder: the checkpoint folder.
        index: index of the model.
        options: options from `Strategy.save_options`.
    """
    engine.save_checkpoint(str(folder), tag_of(index), **options)


def load_engine(engine: Any, folder: Path, index: int, process: Process, options: Mapping[str, Any]) -> dict[str, Any]:
    """Make an engine load the files of `save_engine`; called on every process.

    DeepSpeed unpickles its files, so each is first checked by one process, without running code from it.

    Args:
        engine: an engine of DeepSpeed.
        folder: the checkpoint folder.
        index: index of the model.
        process: this process.
        options: options from `LOAD_OPTIONS`.

    Returns:
        The saved `client_state`.

    Raises:
        SettingError: DeepSpeed has no such option.
        CheckpointError: files are missing or damaged, contain code, or belong to another stage or number of processes.
    """
    unknown = sorted(options.keys() - LOAD_OPTIONS.keys())
    if unknown:
        raise SettingError(
            f"Cannot call load_state() with {', '.join(unknown)}.",
            "DeepSpeed has no such loading options.",
            f"Remove them; DeepSpeed has {', '.join(LOAD_OPTIONS)}.",
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
    arguments = {LOAD_OPTIONS[name]: value for name, value in options.items()}
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
    failure = f"Cannot load the DeepSpeed checkpoint {place}."
    files = sorted(place.rglob("*.pt")) if place.is_dir() else []
    if not files:
        raise CheckpointError(failure, "The folder with DeepSpeed's files does not exist.", "Use another checkpoint.")
    ours = int(engine.zero_optimization_stage())
    anything_fits = engine.load_universal_checkpoint() or not (optimizer or ours == 3)
    if not anything_fits:
        _check_writers(failure, place, files, ours, process.world_size)
    for file in files[process.rank :: process.world_size]:
        with torch.serialization.safe_globals(list(_ALLOWED_CLASSES)):
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
