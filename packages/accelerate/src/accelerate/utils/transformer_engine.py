"""What is found at the old address `accelerate.utils.transformer_engine`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_plugins.precision.transformer_engine import (
        apply_fp8_autowrap,
        contextual_fp8_autocast,
        convert_model,
        has_transformer_engine_layers,
    )

__all__ = ("apply_fp8_autowrap", "contextual_fp8_autocast", "convert_model", "has_transformer_engine_layers")

serve(__name__)
