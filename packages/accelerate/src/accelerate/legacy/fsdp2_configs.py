"""Functions with the original's names that convert config files from FSDP version 1 to version 2."""

from __future__ import annotations

import logging
from argparse import Namespace
from enum import Enum
from typing import Any, Final

from accel_cli.commands.convert import current_key, target_of
from accel_cli.config.file import read_tables
from accel_cli.config.write import write_config
from accel_plugins.fsdp.conversion import CONVERSION
from accel_state.errors import SettingError

__all__ = (
    "ARGUMENT_KEY_MAPPING",
    "ARGUMENT_VALUE_MAPPING",
    "ConversionStatus",
    "convert_config_to_fsdp2",
    "load_config",
    "to_fsdp2_command",
)

_logger = logging.getLogger(__name__)


class ConversionStatus(Enum):
    """Why a key for FSDP version 1 has no equivalent in version 2."""

    NOT_YET_IMPLEMENTED = 0
    REMOVED = -1


_RESHARDS: Final = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
}

ARGUMENT_KEY_MAPPING: Final = {
    "fsdp_version": "fsdp_version",
    "fsdp_reshard_after_forward": "fsdp_reshard_after_forward",
    "fsdp_auto_wrap_policy": "fsdp_auto_wrap_policy",
    "fsdp_backward_prefetch": ConversionStatus.REMOVED,
    "fsdp_forward_prefetch": ConversionStatus.NOT_YET_IMPLEMENTED,
    "fsdp_cpu_ram_efficient_loading": "fsdp_cpu_ram_efficient_loading",
    "fsdp_offload_params": "fsdp_offload_params",
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward",
    "fsdp_state_dict_type": "fsdp_state_dict_type",
    "fsdp_sync_module_states": ConversionStatus.REMOVED,
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_min_num_params": "fsdp_min_num_params",
    "fsdp_use_orig_params": ConversionStatus.REMOVED,
    "fsdp_activation_checkpointing": "fsdp_activation_checkpointing",
}

ARGUMENT_VALUE_MAPPING: Final = {"fsdp_reshard_after_forward": _RESHARDS, "fsdp_sharding_strategy": _RESHARDS}


def load_config(config_file: str) -> dict[str, Any]:
    """Read a config file as a dict.

    Raises:
        SettingError: it cannot be read, or is empty.
    """
    tables = read_tables(str(config_file))
    if not tables:
        raise SettingError(f"Cannot read the config file {config_file}.", "It is empty.", "Check the path.")
    return tables


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Convert a config for FSDP version 1 to version 2 in place; other configs are returned unchanged."""
    if not config.get("fsdp_config"):
        return config
    converted = CONVERSION.convert(config, current_key)
    if converted.values is None:
        _logger.warning("Config already specifies FSDP2, skipping conversion...")
    for note in converted.notes:
        _logger.warning(note)
    config.update(converted.values or {})
    return config


def to_fsdp2_command(args: Namespace) -> None:
    """Convert a config file.

    Raises:
        NotFound: there is no such file.
        AlreadyExists: the output file exists, and overwriting is not allowed.
    """
    target = target_of(args, CONVERSION.result)
    write_config(target, convert_config_to_fsdp2(load_config(args.config_file)))
