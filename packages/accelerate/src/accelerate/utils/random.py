"""What is found at the old address `accelerate.utils.random`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_ops.rng import set_seed, synchronize_rng_state, synchronize_rng_states

__all__ = ("set_seed", "synchronize_rng_state", "synchronize_rng_states")

serve(__name__)
