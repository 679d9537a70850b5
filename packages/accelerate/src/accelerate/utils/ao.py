"""What is found at the old address `accelerate.utils.ao`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_plugins.precision.torchao import (
        convert_model_to_fp8_ao,
        filter_first_and_last_linear_layers,
        filter_linear_layers,
        find_first_last_linear_layers,
        has_ao_layers,
    )

__all__ = (
    "convert_model_to_fp8_ao",
    "filter_first_and_last_linear_layers",
    "filter_linear_layers",
    "find_first_last_linear_layers",
    "has_ao_layers",
)

serve(__name__)
