"""What the objects of one `prepare` call say about DeepSpeed's configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from accel_plugins.deepspeed.filling import AUTO, Fact
from accel_plugins.deepspeed.stand_ins import DummyOptim, DummyScheduler
from accel_state.errors import Conflict, SettingError

if TYPE_CHECKING:
    from torch.nn import Module

    from accel_plugins.bundle import Bundle
    from accel_plugins.deepspeed.config import DeepSpeedPlugin

__all__ = ("about_batches", "about_objects", "check_stand_ins")

_PERSISTENT: Final = 10
_PREFETCHED: Final = 0.9


def check_stand_ins(plugin: DeepSpeedPlugin, bundle: Bundle) -> None:
    """Refuse an optimizer or scheduler that the configuration describes already, and one that nobody describes.

    Raises:
        Conflict: both are given.
        SettingError: neither is given.
    """
    for optimizer in bundle.optimizers:
        _check_one(plugin, "optimizer", optimizer, isinstance(optimizer, DummyOptim), "DummyOptim")
    own = any(isinstance(optimizer, DummyOptim) for optimizer in bundle.optimizers)
    for scheduler in bundle.schedulers:
        stands = isinstance(scheduler, DummyScheduler)
        if own and not stands and not isinstance(getattr(scheduler, "optimizer", None), DummyOptim):
            raise Conflict(
                f"prepare() was given {type(scheduler).__name__} and a DummyOptim.",
                "DeepSpeed makes the optimizer, and this scheduler follows another one.",
                "Give DummyScheduler(optimizer, lr_scheduler_callable=...), which makes it for DeepSpeed's optimizer.",
            )
        if not stands or scheduler.lr_scheduler_callable is None:
            _check_one(plugin, "scheduler", scheduler, stands, "DummyScheduler")


def _check_one(plugin: DeepSpeedPlugin, entry: str, given: Any, stands: bool, dummy: str) -> None:
    described = isinstance(plugin.get_value(entry), dict)
    asked = f"prepare() was given {type(given).__name__}."
    if described and not stands:
        raise Conflict(
            asked,
            f'The DeepSpeed configuration describes the {entry} too (entry "{entry}").',
            f'Give accel_plugins.deepspeed.{dummy} in its place, or remove the entry "{entry}".',
        )
    if stands and not described:
        raise SettingError(
            asked,
            f'The DeepSpeed configuration has no entry "{entry}" that says what it stands for.',
            f'Add "{entry}" to the configuration, or give a real one.',
        )


def about_batches(
    plugin: DeepSpeedPlugin, bundle: Bundle, shards: int, steps: int, together: int = 1, seen: Iterable[Any] = ()
) -> list[Fact]:
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
    micro = plugin.get_value("train_micro_batch_size_per_gpu", AUTO)
    if micro == AUTO:
        sizes = _sizes(bundle.loaders, shards) or _sizes(seen, shards)
        if not sizes and bundle.optimizers:
            raise SettingError(
                "DeepSpeed was to start.",
                "It has to know the size of a batch, and neither a loader with a batch size was given to prepare() nor "
                "does the configuration say it.",
                "Prepare the training loader in the same call, or set train_micro_batch_size_per_gpu.",
            )
        # A model that is only evaluated takes batches of any size.
        micro = (min if plugin.is_train_batch_min else max)(sizes or [1])
    counted = shards // together
    total = int(micro) * steps * counted
    return [
        Fact("gradient_accumulation_steps", steps, f"gradient_accumulation_steps={steps}", True),
        Fact("train_micro_batch_size_per_gpu", int(micro), "the loaders given to prepare()", True, False),
        Fact("train_batch_size", total, f"{micro} samples x {steps} micro-batches x {counted} processes"),
    ]


def _sizes(loaders: Iterable[Any], shards: int) -> list[int]:
    return [size // shards for loader in loaders if (size := getattr(loader, "total_batch_size", None))]


def about_objects(bundle: Bundle) -> Iterator[Fact]:
    """Learning rates and schedules from stand-ins, sizes of ZeRO stage 3 from the model."""
    yield _suggestion("gradient_clipping", 1.0)
    yield _suggestion("zero_optimization.stage3_gather_16bit_weights_on_model_save", False)
    for what in ("optimizer", "param"):
        yield _suggestion(f"zero_optimization.offload_{what}.device", "none")
    for model in bundle.models:
        yield from _about_model(model)
    for optimizer in bundle.optimizers:
        if isinstance(optimizer, DummyOptim):
            yield _suggestion("optimizer.params.lr", optimizer.lr)
            yield _suggestion("optimizer.params.weight_decay", optimizer.weight_decay)
    for scheduler in bundle.schedulers:
        if isinstance(scheduler, DummyScheduler):
            yield from _about_schedule(scheduler)


def _about_schedule(scheduler: DummyScheduler) -> Iterator[Fact]:
    yield _suggestion("scheduler.params.warmup_min_lr", 0)
    rate = getattr(scheduler.optimizer, "lr", None)
    if rate is not None:
        yield _suggestion("scheduler.params.warmup_max_lr", rate)
    yield _suggestion("scheduler.params.warmup_num_steps", scheduler.warmup_num_steps)
    if scheduler.total_num_steps is not None:
        yield _suggestion("scheduler.params.total_num_steps", scheduler.total_num_steps)


def _about_model(model: Module) -> Iterator[Fact]:
    hidden = _hidden_size(getattr(model, "config", None))
    if hidden is None:
        return
    yield _suggestion("zero_optimization.reduce_bucket_size", hidden * hidden)
    yield _suggestion("zero_optimization.stage3_prefetch_bucket_size", int(_PREFETCHED * hidden * hidden))
    yield _suggestion("zero_optimization.stage3_param_persistence_threshold", _PERSISTENT * hidden)


def _suggestion(key: str, value: Any) -> Fact:
    return Fact(key, value, "default", binding=False)


def _hidden_size(config: Any) -> int | None:
    """Width of a model's layers, as configurations of transformers tell it."""
    if config is None:
        return None
    size = getattr(config, "hidden_size", None)
    if size is None and getattr(config, "hidden_sizes", None):
        size = max(config.hidden_sizes)
    return _hidden_size(getattr(config, "text_config", None)) if size is None else int(size)
