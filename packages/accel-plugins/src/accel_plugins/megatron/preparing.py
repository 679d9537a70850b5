"""From what `prepare` was given to the parts of an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_plugins.megatron import building
from accel_plugins.megatron.stand_ins import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
from accel_state.errors import Conflict, SettingError

if TYPE_CHECKING:
    from accel_plugins.bundle import Bundle
    from accel_plugins.megatron.config import MegatronLMPlugin

__all__ = ("Started", "check_batches", "prepare_schedule", "source_of", "start", "take_facts")


class Started(NamedTuple):
    """What an engine drives.

    Args:
        model: the parts of the model that this process holds.
        optimizer: that of Megatron-LM.
        scheduler: the one that follows it, or None.
    """

    model: list[Any]
    optimizer: Any
    scheduler: Any


def check_batches(plugin: MegatronLMPlugin, bundle: Bundle) -> None:
    """Refuse a model of which nobody says how large its batches are.

    Raises:
        SettingError: nobody does.
    """
    if plugin.micro_batch_size is None and not any(_micro_batch(loader, plugin, 1) for loader in bundle.loaders):
        raise SettingError(
            "Cannot train a model with Megatron-LM.",
            "It has to know the size of a micro-batch, and no loader with a batch size was given to prepare().",
            "Prepare the training loader in the same call.",
        )


def _micro_batch(loader: Any, plugin: MegatronLMPlugin, shards: int) -> int | None:
    """Samples of a micro-batch on one process, as a loader says it; it may be prepared or not."""
    said = getattr(loader, "dataset_args", {}).get("micro_batch_size")
    if said is not None:
        return int(said)
    total = getattr(loader, "total_batch_size", None)
    if total is not None:
        joined = getattr(loader, "micro_batches", 1)
        return int(total) // shards // joined
    plain = getattr(loader, "batch_size", None)
    return None if plain is None else int(plain)


def take_facts(plugin: MegatronLMPlugin, bundle: Bundle, shards: int) -> None:
    """Bring the sizes of batches and of the model, and the kinds of optimizer and schedule, into the settings.

    Raises:
        SettingError, NotOffered, Conflict: Megatron-LM cannot train this.
    """
    sizes = [size for loader in bundle.loaders if (size := _micro_batch(loader, plugin, shards))]
    if sizes:
        plugin.set_training_args(min(sizes) if plugin.is_train_batch_min else max(sizes), shards)
    elif plugin.micro_batch_size is not None:
        plugin.set_training_args(plugin.micro_batch_size, shards)
    if plugin.custom_model_provider_function is None:
        plugin.set_network_size_args(bundle.models[0])
    plugin.set_optimizer_type(bundle.optimizers[0])
    for scheduler in bundle.schedulers:
        if isinstance(scheduler, MegatronLMDummyScheduler):
            plugin.set_scheduler_args(scheduler)
    building.check_arguments(plugin)


def start(accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> Started:
    """Build the model in its divided form, its optimizer and its schedule; the settings know all sizes.

    Args:
        accelerator: has `device` and `state.megatron_lm_plugin`.
        model: only its configuration was of use.
        optimizer: that of the script; only its numbers were.
        scheduler: a stand-in, one of torch, or None.
    """
    plugin = accelerator.state.megatron_lm_plugin
    parts = building.build_model(plugin, accelerator.device)
    made = building.build_optimizer(plugin, parts)
    return Started(parts, made, None if scheduler is None else prepare_schedule(plugin, made, scheduler))


def prepare_schedule(plugin: MegatronLMPlugin, optimizer: Any, scheduler: Any) -> Any:
    """A schedule that follows Megatron-LM's optimizer: its own for a stand-in, else the one given, bound to it.

    Raises:
        Conflict: the one given has other groups of parameters.
    """
    if isinstance(scheduler, MegatronLMDummyScheduler):
        return building.build_schedule(plugin, optimizer)
    rates = list(scheduler.base_lrs)
    if len(set(rates)) > 1 or len({id(f) for f in getattr(scheduler, "lr_lambdas", ())}) > 1:
        raise Conflict(
            f"{type(scheduler).__name__} was given to prepare(), with several learning rates.",
            "Megatron-LM makes groups of its own.",
            "Use one learning rate, or MegatronLMPlugin(scale_lr_cond=..., lr_mult=...).",
        )
    groups = optimizer.param_groups
    scheduler.optimizer = optimizer
    scheduler.base_lrs = [rates[0]] * len(groups)
    if hasattr(scheduler, "lr_lambdas"):
        scheduler.lr_lambdas = [scheduler.lr_lambdas[0]] * len(groups)
    for group in groups:
        group["initial_lr"], group["lr"] = rates[0], scheduler.get_last_lr()[0]
    return scheduler


def source_of(accelerator: Any, loader: MegatronLMDummyDataLoader) -> Callable[[], tuple[Any, Any, Any]]:
    """The function that makes the iterators of a stand-in for data, the same at every call."""
    plugin = accelerator.state.megatron_lm_plugin
    loader.set_megatron_data_args(plugin)

    def made() -> tuple[Any, Any, Any]:
        kept = getattr(loader, "_iterators", None)
        if kept is None:
            kept = loader.build_train_valid_test_data_iterators(accelerator)
            vars(loader)["_iterators"] = kept
        iterators: tuple[Any, Any, Any] = kept
        return iterators

    return made
