"""What is found at the old address `accelerate.utils.environment`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_state.affinity import override_numa_affinity, set_numa_affinity

__all__ = ("override_numa_affinity", "set_numa_affinity")

serve(__name__)
