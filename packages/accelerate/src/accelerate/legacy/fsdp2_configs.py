"""Functions with the original's names that convert config files from FSDP version 1 to version 2."""

from __future__ import annotations

import logging
from argparse import Namespace
from typing import Any

from accel_cli.commands.convert import current_key, target_of
from accel_cli.config.file import read_tables
from accel_cli.config.write import write_config
from accel_plugins.fsdp.conversion import CONVERSION
from accel_state.errors import SettingError

_logger = logging.getLogger(__name__)


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
