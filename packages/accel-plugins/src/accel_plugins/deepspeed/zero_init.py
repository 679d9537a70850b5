"""Sharding parameters while models are built (ZeRO stage 3), through transformers and DeepSpeed."""

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
_WHILE_BUILDING: Final = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_optimization.reduce_bucket_size": 1,
    "zero_optimization.stage3_prefetch_bucket_size": 0,
    "zero_optimization.stage3_param_persistence_threshold": 0,
}
"""What DeepSpeed has to read as numbers while a model is built; none of it counts there."""


def transformers_view(table: Mapping[str, Any], sharded: bool) -> Any:
    """The object through which transformers, and who asks it, sees the configuration; None where it cannot be had.

    It is seen for as long as it lives and no other is made. It cannot be had without transformers, nor without the
    distribution `accelerate`, whose name transformers looks for; models are built whole then, and sharded when they are
    prepared.

    Args:
        table: DeepSpeed's configuration.
        sharded: whether parameters of stage 3 are sharded while models are built, and when they generate.
    """
    if not importable("transformers"):
        return None
    if installed_version("accelerate") is None:
        if sharded:
            _logger.warning(
                "transformers builds models whole: it shards them where the package accelerate is installed."
            )
        return None
    from accel_plugins.deepspeed.ds_config import HfDeepSpeedConfig

    ds_config = HfDeepSpeedConfig(copy.deepcopy(dict(table)))
    ds_config.del_config_sub_tree("train_batch_size")
    for key, value in _WHILE_BUILDING.items():
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
    """Let ZeRO stage 3 take each layer of some classes as one piece.

    Raises:
        SettingError: the model has no layer of such a class.
    """
    import deepspeed

    by_name = {type(module).__name__: type(module) for module in model.modules()}
    wanted = [name.strip() for name in names if name.strip()]
    missing = [name for name in wanted if name not in by_name]
    if missing:
        raise SettingError(
            f"Cannot use transformer_moe_cls_names={','.join(wanted)!r}.",
            f"{type(model).__name__} has no layer of the class {', '.join(missing)}.",
            "Name the classes of its mixture-of-experts layers.",
        )
    deepspeed.utils.set_z3_leaf_modules(model, [by_name[name] for name in wanted])


def gathered(
    parameters: Any, modifier_rank: int | None = None, forward_module: Any = None, enabled: bool = True
) -> AbstractContextManager[None]:
    """A block in which parameters are whole that DeepSpeed shards; where none are sharded, it changes nothing.

    Args:
        parameters: one or several.
        modifier_rank: the process whose changes are given to all; None when nothing is changed.
        forward_module: the module that uses them in forward, where it does so unusually.
        enabled: False makes it do nothing.

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
