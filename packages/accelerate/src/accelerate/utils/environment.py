"""What is found at the old address `accelerate.utils.environment`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_state.affinity import override_numa_affinity, set_numa_affinity
    from accel_state.devices.cuda import check_cuda_fp8_capability

__all__ = ("check_cuda_fp8_capability", "override_numa_affinity", "set_numa_affinity")

serve(__name__)
