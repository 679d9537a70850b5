"""What is found at the old address `accelerate.commands.estimate`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accelerate.legacy.commands import estimate_command, estimate_command_parser
    from accelerate.legacy.commands import estimate_main as main
    from accelerate.legacy.estimating import (
        add_timm_hub_prefix,
        check_has_model,
        create_ascii_table,
        create_empty_model,
        estimate_training_usage,
        gather_data,
        verify_on_hub,
    )

__all__ = (
    "add_timm_hub_prefix",
    "check_has_model",
    "create_ascii_table",
    "create_empty_model",
    "estimate_command",
    "estimate_command_parser",
    "estimate_training_usage",
    "gather_data",
    "main",
    "verify_on_hub",
)

if __name__ == "__main__":
    from accelerate.legacy.commands import estimate_main

    raise SystemExit(estimate_main())

serve(__name__)
