"""What is found at the old address `accelerate.commands.to_fsdp2`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.commands import to_fsdp2_command_parser
    from accelerate.legacy.fsdp2_configs import (
        ARGUMENT_KEY_MAPPING,
        ARGUMENT_VALUE_MAPPING,
        ConversionStatus,
        convert_config_to_fsdp2,
        load_config,
        to_fsdp2_command,
    )

__all__ = (
    "ARGUMENT_KEY_MAPPING",
    "ARGUMENT_VALUE_MAPPING",
    "ConversionStatus",
    "convert_config_to_fsdp2",
    "load_config",
    "to_fsdp2_command",
    "to_fsdp2_command_parser",
)

serve(__name__)
