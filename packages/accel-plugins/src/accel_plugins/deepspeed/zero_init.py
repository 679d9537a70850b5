"""Shard parameters while models are created (ZeRO stage 3), through transformers and DeepSpeed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from accel_plugins.deepspeed.ds_config import AUTO_ENTRY
from accel_plugins.deepspeed.manifest import REQUIREMENT
from accel_state.errors import SettingError
from accel_state.settings.installed import importable, installed_version

__all__ = ("gathered", "set_leaf_modules", "transformers_view")

_logger: Final = logging.getLogger(__name__)
_ENTRIES_WHILE_BUILDING: Final = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_optimization.reduce_bucket_size": 1,
    "zero_optimization.stage3_prefetch_bucket_size": 0,
    "zero_optimization.stage3_param_persistence_threshold": 0,
}
"""Entries that DeepSpeed reads as numbers while a model is created; their values have no effect there."""


def transformers_view(table: Mapping[str, Any], sharded: bool) -> Any:
    """The object through which transformers reads the configuration; None if it is not available.

    transformers uses it while it exists and no other is created. It is not available without transformers, or without a
    distribution named `accelerate`, which transformers requires; models are then created unsharded, and sharded by
    `prepare`.

    Args:
        table: DeepSpeed's configuration, as a dict.
        sharded: whether parameters of stage 3 are sharded while models are created, and in `generate`.
    """
    if not importable("transformers"):
        return None
    if installed_version("accelerate") is None:
        if sharded:
            _logger.warning(
                "transformers creates unsharded models: it shards them only if the package accelerate is installed."
            )
        return None
    from accel_plugins.deepspeed.ds_config import HfDeepSpeedConfig

    ds_config = HfDeepSpeedConfig(copy.deepcopy(dict(table)))
    ds_config.del_config_sub_tree("train_batch_size")
    for key, value in _ENTRIES_WHILE_BUILDING.items():
        if ds_config.get_value(key) == AUTO_ENTRY:
            ds_config.set_value(key, value)
    for own in ("fp16", "bf16"):
        if ds_config.get_value(f"{own}.enabled") == AUTO_ENTRY:
            ds_config.set_value(f"{own}.enabled", False)
    from transformers.integrations import HfDeepSpeedConfig as View

    if ds_config.is_zero3() and not sharded:
        ds_config.set_value("zero_optimization.stage", 0)
    return View(ds_config.config)


def set_leaf_modules(model: Any, names: Iterable[str]) -> None:
    """Make ZeRO stage 3 treat each layer of some classes as one unit.

    Raises:
        SettingError: the model has no layer of one of these classes.
    """
    import deepspeed

    by_name = {type(module).__name__: type(module) for module in model.modules()}
    wanted = [name.strip() for name in names if name.strip()]
    missing = [name for name in wanted if name not in by_name]
    if missing:
        raise SettingError(
            f"Cannot use transformer_moe_cls_names={','.join(wanted)!r}.",
            f"{type(model).__name__} has no layer of the class {', '.join(missing)}.",
            "Set the class names of its mixture-of-experts layers.",
        )
    deepspeed.utils.set_z3_leaf_modules(model, [by_name[name] for name in wanted])


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
