"""Engines of DeepSpeed: the auto values that models, optimizers and loaders give, its gradients, and its checkpoints.

An engine writes its files by itself, in folders named as the original names them.
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

_WARM_UP: Final = "scheduler.params.warmup_num_steps"


class Started(NamedTuple):
    """An engine and what it drives.

    Args:
        engine: takes the place of the model.
        optimizer: that of the engine, or None.
        scheduler: the one that the engine moves, or None.
    """

    engine: Any
    optimizer: Any
    scheduler: Any


def is_engine(model: object) -> bool:
    """Whether an object is an engine of DeepSpeed."""
    return isinstance(model, DeepSpeedEngine)


def parameters_behind(loss: Tensor) -> set[int]:
    """Ids of the parameters that a loss was computed with."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [before for before, _ in node.next_functions]
    return found


def trains_in_fp16() -> bool:
    """Whether DeepSpeed trains in fp16 on the devices that are here."""
    return bool(get_accelerator().is_fp16_supported())


def dtype_of(precision: Precision) -> torch.dtype | None:
    """In which dtype DeepSpeed keeps parameters; None leaves them as they are."""
    return precision.dtype


def start(
    plugin: DeepSpeedPlugin,
    context: Context,
    bundle: Bundle,
    sizes: Iterable[AutoValue],
    ulysses: Ulysses | None = None,
) -> Started:
    """Complete the configuration and make the engine; called on every process.

    Args:
        plugin: the configuration; what it left to be found out is put into it.
        context: the context of the run.
        bundle: one model, at most one optimizer, its schedulers, and prepared loaders.
        sizes: of batches, as `batch_values` knows them.
        ulysses: shards the sequences of the model; None where they are not sharded.

    Raises:
        SettingError: the configuration is incomplete.
        Conflict: it contradicts what was prepared, or the model's sequences cannot be sharded.
        NotOffered: DeepSpeed has no such optimizer on the host, or shards no sequences of such a model.
    """
    (model,) = bundle.models
    ds_config = plugin.hf_ds_config
    fill_auto(ds_config, sizes)
    fill_auto(ds_config, object_values(bundle))
    if ds_config.get_value(_WARM_UP) == 0:
        # DeepSpeed takes a warm-up of 1 for none, as it took 0 before 0.19.6, which refuses it.
        ds_config.set_value(_WARM_UP, 1)
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
    moved = [given for given in bundle.schedulers if _moves_by_engine(given)]
    return Started(engine, optimizer, scheduler if moved else None)


def before_each_update(engine: DeepSpeedEngine, notify: Callable[[DeepSpeedEngine], None]) -> None:
    """Call a function before each step of an engine that changes parameters; gradients are reduced then."""
    step = engine.step

    def announced(*arguments: Any, **named: Any) -> Any:
        if engine.is_gradient_accumulation_boundary():
            notify(engine)
        return step(*arguments, **named)

    engine.step = announced


def full_gradients(engine: Any) -> dict[str, Tensor]:
    """The gradients that an engine steps with, before it clips them; called on every process, between its two halves.

    Those of parameters that forward did not reach are zeros.
    """
    found = {}
    for name, parameter in engine.module.named_parameters():
        gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
        if gradient is not None:
            found[canonical_name(name)] = gradient.detach().clone()
    return found


def end(engine: DeepSpeedEngine) -> None:
    """Let an engine give back what it holds."""
    inside = set(engine.modules())
    engine.destroy()
    # ZeRO stage 3 keeps every model that it sharded in a list, and in the caches of methods (seen in 0.19.8).
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
    """Let a scheduler of torch follow another optimizer; it warns unless it sees that one step."""
    inner = optimizer.step

    def step(*arguments: Any, **named: Any) -> Any:
        optimizer._opt_called = True
        return inner(*arguments, **named)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step
    scheduler.optimizer = optimizer


def _scheduler(bundle: Bundle) -> dict[str, Any]:
    """A scheduler that the engine moves and that its configuration does not describe."""
    for scheduler in bundle.schedulers:
        if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is not None:
            return {"lr_scheduler": scheduler.lr_scheduler_callable}
        if type(scheduler).__name__ in VALID_LR_SCHEDULES:
            return {"lr_scheduler": scheduler}
    return {}


def _moves_by_engine(scheduler: Any) -> bool:
    return isinstance(scheduler, DummyScheduler) or type(scheduler).__name__ in VALID_LR_SCHEDULES


def _cast_inputs(engine: Any, precision: Precision) -> None:
    """Bring floating-point inputs to the dtype of the parameters, which DeepSpeed leaves to the script."""
    dtype = dtype_of(precision)
    if dtype is None:
        return

    def cast(module: Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return recursively_apply(lambda tensor: tensor.to(dtype), (arguments, named), test_type=_is_floating)

    engine.module.register_forward_pre_hook(cast, with_kwargs=True)


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


_PERSISTENT: Final = 10
_PREFETCHED: Final = 0.9


def check_placeholders(plugin: DeepSpeedPlugin, bundle: Bundle) -> None:
    """Refuse an optimizer or scheduler that the configuration describes already, and one that nobody describes.

    Raises:
        Conflict: both are given.
        SettingError: neither is given.
    """
    for optimizer in bundle.optimizers:
        _check_one(plugin, "optimizer", optimizer, isinstance(optimizer, DummyOptim), "DummyOptim")
    own = any(isinstance(optimizer, DummyOptim) for optimizer in bundle.optimizers)
    for scheduler in bundle.schedulers:
        placeholder = isinstance(scheduler, DummyScheduler)
        if own and not placeholder and not isinstance(getattr(scheduler, "optimizer", None), DummyOptim):
            raise Conflict(
                f"Cannot prepare {type(scheduler).__name__} together with a DummyOptim.",
                "DeepSpeed creates the optimizer, and this scheduler changes another one.",
                "Give DummyScheduler(optimizer, lr_scheduler_callable=...), which DeepSpeed's optimizer then gets.",
            )
        if not placeholder or scheduler.lr_scheduler_callable is None:
            _check_one(plugin, "scheduler", scheduler, placeholder, "DummyScheduler")


def _check_one(plugin: DeepSpeedPlugin, entry: str, given: Any, placeholder: bool, dummy: str) -> None:
    described = isinstance(plugin.get_value(entry), dict)
    asked = f"Cannot prepare {type(given).__name__} with this DeepSpeed configuration."
    if described and not placeholder:
        raise Conflict(
            asked,
            f'The configuration describes the {entry} too (entry "{entry}").',
            f'Give accel_plugins.deepspeed.objects.{dummy}, or remove the entry "{entry}".',
        )
    if placeholder and not described:
        raise SettingError(
            asked,
            f'The configuration has no entry "{entry}" that describes it.',
            f'Add "{entry}" to the configuration, or give a real one.',
        )


def batch_values(
    plugin: DeepSpeedPlugin, bundle: Bundle, shards: int, steps: int, together: int = 1, seen: Iterable[Any] = ()
) -> list[AutoValue]:
    """Sizes of batches, from prepared loaders.

    Args:
        plugin: the configuration.
        bundle: its loaders know how many samples all processes together take.
        shards: into how many slices a batch is cut.
        steps: micro-batches per optimizer step.
        together: processes that compute one batch, one after the other that of each of them.
        seen: loaders that were prepared before, for a model that comes without one.

    Raises:
        SettingError: neither a loader nor the configuration says the size.
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
        # A model that is only evaluated takes batches of any size.
        micro = (min if plugin.is_train_batch_min else max)(sizes or [1])
    counted = shards // together
    total = int(micro) * steps * counted
    return [
        AutoValue("gradient_accumulation_steps", steps, f"gradient_accumulation_steps={steps}", True),
        AutoValue("train_micro_batch_size_per_gpu", int(micro), "the loaders given to prepare()", True, False),
        AutoValue("train_batch_size", total, f"{micro} samples x {steps} micro-batches x {counted} processes"),
    ]


def _sizes(loaders: Iterable[Any], shards: int) -> list[int]:
    return [size // shards for loader in loaders if (size := getattr(loader, "total_batch_size", None))]


def object_values(bundle: Bundle) -> Iterator[AutoValue]:
    """Learning rates and schedules from placeholders, sizes of ZeRO stage 3 from the model."""
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
    yield _suggestion("zero_optimization.stage3_prefetch_bucket_size", int(_PREFETCHED * hidden * hidden))
    yield _suggestion("zero_optimization.stage3_param_persistence_threshold", _PERSISTENT * hidden)


def _suggestion(key: str, value: Any) -> AutoValue:
    return AutoValue(key, value, "default", binding=False)


def _hidden_size(config: Any) -> int | None:
    """Width of a model's layers, as configurations of transformers tell it."""
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
"""Options of DeepSpeed's `load_checkpoint`, by the names under which `load_state` is given them."""

_CLASSES: Final = (LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address)
"""What files of DeepSpeed hold besides tensors and plain data."""

_UNIVERSAL: Final = "_universal"
_SETTING: Final = '"checkpoint": {"load_universal": true}'

_PART: Final = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_(optim|model)_states\.pt$")


def tag_of(index: int) -> str:
    """Name of the folder for the model with this index."""
    return "pytorch_model" if index == 0 else f"pytorch_model_{index}"


def save_engine(engine: Any, folder: Path, index: int, options: Mapping[str, Any]) -> None:
    """Let an engine write its model, optimizer and schedule; called on every process.

    Args:
        engine: of DeepSpeed.
        folder: of the checkpoint.
        index: of the model.
        options: of the manifest's `save_options`.
    """
    engine.save_checkpoint(str(folder), tag_of(index), **options)


def load_engine(engine: Any, folder: Path, index: int, process: Process, options: Mapping[str, Any]) -> dict[str, Any]:
    """Let an engine read what `save_engine` wrote; called on every process.

    DeepSpeed unpickles its files, so they are looked through before, each by one process, and nothing in them is run.

    Args:
        engine: of DeepSpeed.
        folder: of the checkpoint.
        index: of the model.
        process: who this process is.
        options: of `LOAD_OPTIONS`.

    Returns:
        What was saved as `client_state`.

    Raises:
        SettingError: DeepSpeed has no such option.
        CheckpointError: files are missing, damaged, hold code, or belong to another stage or number of processes.
    """
    unknown = sorted(options.keys() - LOAD_OPTIONS.keys())
    if unknown:
        raise SettingError(
            f"Cannot call load_state() with {', '.join(unknown)}.",
            "DeepSpeed has no such loading options.",
            f"Leave them out; it knows {', '.join(LOAD_OPTIONS)}.",
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
    """The folder that DeepSpeed's converter made of another.

    Raises:
        CheckpointError: there is none.
    """
    for folder in (place.with_name(f"{place.name}{_UNIVERSAL}"), place):
        if (folder / "zero").is_dir():
            return folder
    raise CheckpointError(
        f"Cannot load the universal DeepSpeed checkpoint of {place} (checkpoint.load_universal).",
        "It was not converted.",
        f"Run: {_conversion(place)}",
    )


def _conversion(place: Path) -> str:
    """The command that makes a universal checkpoint."""
    return (
        f"python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {place} "
        f"--output_folder {place}{_UNIVERSAL}"
    )


def _look_through(engine: Any, place: Path, process: Process, optimizer: bool) -> None:
    """Refuse files that do not fit or hold code; each is read by one process.

    Args:
        engine: reads them afterwards.
        place: their folder.
        process: who this process is.
        optimizer: whether the states of the optimizer are to be read, too.
    """
    asked = f"Cannot load the DeepSpeed checkpoint {place}."
    files = sorted(place.rglob("*.pt")) if place.is_dir() else []
    if not files:
        raise CheckpointError(asked, "There is no such folder with files of DeepSpeed.", "Name another checkpoint.")
    ours = int(engine.zero_optimization_stage())
    anything_fits = engine.load_universal_checkpoint() or not (optimizer or ours == 3)
    if not anything_fits:
        _check_writers(asked, place, files, ours, process.world_size)
    for file in files[process.rank :: process.world_size]:
        with torch.serialization.safe_globals(list(_CLASSES)):
            state = pickled.read(file, map_location="meta")
        found = _PART.search(file.name)
        if found and found[2] == "optim" and not anything_fits:
            _check_stage(asked, place, state, ours)


def _check_writers(asked: str, place: Path, files: Sequence[Path], ours: int, processes: int) -> None:
    found = [part for file in files if (part := _PART.search(file.name))]
    writers = {part[1] for part in found}
    if writers and len(writers) != processes:
        raise CheckpointError(
            asked,
            f"It was written by {len(writers)} processes, and these are {processes}.",
            f"Start {len(writers)} processes, or convert it by {_conversion(place)} and load it with {_SETTING} in the "
            "configuration of DeepSpeed.",
        )
    if ours and not any(part[2] == "optim" for part in found):
        raise _other_stage(asked, place, 0, ours)


def _check_stage(asked: str, place: Path, state: Any, ours: int) -> None:
    held = state.get("optimizer_state_dict") if isinstance(state, Mapping) else None
    stage = held.get("zero_stage") if isinstance(held, Mapping) else None
    if stage is not None and int(stage) != ours:
        raise _other_stage(asked, place, int(stage), ours)


def _other_stage(asked: str, place: Path, theirs: int, ours: int) -> CheckpointError:
    return CheckpointError(
        asked,
        f"It was written with ZeRO stage {theirs}, and this run has stage {ours}.",
        f"Use zero_stage={theirs}, convert it by {_conversion(place)} and load it with {_SETTING} in the configuration "
        "of DeepSpeed, or take the weights alone with the script zero_to_fp32.py beside it.",
    )


def full_weights(engine: Any) -> dict[str, Tensor]:
    """All weights of an engine's model on the process that writes; called on every process.

    Raises:
        NotReady: they are sharded, and the settings do not gather them.
    """
    if int(engine.zero_optimization_stage()) < 3:
        weights: dict[str, Tensor] = engine.module.state_dict()
        return weights
    if not engine.zero_gather_16bit_weights_on_model_save():
        raise NotReady(
            "Cannot read the weights of a model that ZeRO stage 3 shards.",
            "Gathering them when the model is saved is switched off.",
            "Set DeepSpeedPlugin(zero3_save_16bit_model=True), or use the script zero_to_fp32.py on a checkpoint.",
        )
    gathered: dict[str, Tensor] | None = engine._zero3_consolidated_16bit_state_dict()
    return gathered or {}


def put_engine_weights(engine: Any, weights: Mapping[str, Tensor], strict: bool) -> None:
    """Put whole weights into an engine's model, and into the copies that its optimizer keeps.

    Raises:
        NotOffered: parameters are sharded.
    """
    if int(engine.zero_optimization_stage()) >= 3:
        raise NotOffered(
            "Cannot load weights into a model that ZeRO stage 3 shards.",
            "DeepSpeed reads them while the model is built, or from a checkpoint of its own.",
            "Load them before prepare().",
        )
    engine.module.load_state_dict(weights, strict=strict)
    refresh = getattr(engine.optimizer, "refresh_fp32_params", None)
    if refresh is not None:
        refresh()
