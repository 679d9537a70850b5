"""What is found at the old address `accelerate.big_modeling`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_bigmodel.budget import get_balanced_memory as get_balanced_memory
    from accel_bigmodel.device_map import check_device_map as check_device_map
    from accel_bigmodel.device_map import infer_auto_device_map as infer_auto_device_map
    from accel_bigmodel.meta import init_empty_weights, init_on_device
    from accel_bigmodel.tied import find_tied_parameters as find_tied_parameters
    from accel_bigmodel.tied import retie_parameters as retie_parameters

__all__ = ("init_empty_weights", "init_on_device")

serve(__name__)
