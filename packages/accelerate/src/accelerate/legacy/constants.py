"""Constants that only older code reads: lists of option names, and versions in which features of others appeared."""

from __future__ import annotations

import operator
from typing import Final

from accel_plugins.fsdp.config import BACKWARD_PREFETCHES, SHARDING_STRATEGIES, STATE_DICT_TYPES, WRAP_POLICIES

FSDP_SHARDING_STRATEGY: Final = list(SHARDING_STRATEGIES)
FSDP_AUTO_WRAP_POLICY: Final = list(WRAP_POLICIES)
FSDP_BACKWARD_PREFETCH: Final = list(BACKWARD_PREFETCHES)
FSDP_STATE_DICT_TYPE: Final = list(STATE_DICT_TYPES)
FSDP2_STATE_DICT_TYPE: Final = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
FSDP_PYTORCH_VERSION: Final = "2.1.0.a0+32f93b1"
FSDP2_PYTORCH_VERSION: Final = "2.6.0"
DTENSOR_PYTORCH_VERSION: Final = "2.5.0"

XPU_PROFILING_AVAILABLE_PYTORCH_VERSION: Final = "2.4.0"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION: Final = "2.1.0"
PROFILE_PATTERN_NAME: Final = "profile_{suffix}.json"

STR_OPERATION_TO_FUNC: Final = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}
