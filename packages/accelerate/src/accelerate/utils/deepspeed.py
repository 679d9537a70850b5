"""What is found at the old address `accelerate.utils.deepspeed`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_plugins.deepspeed.document import HfDeepSpeedConfig
    from accel_plugins.deepspeed.optimizers import map_pytorch_optim_to_deepspeed
    from accel_plugins.deepspeed.stand_ins import DummyOptim, DummyScheduler
    from accel_plugins.deepspeed.wrappers import (
        DeepSpeedEngineWrapper,
        DeepSpeedOptimizerWrapper,
        DeepSpeedSchedulerWrapper,
    )
    from accelerate.legacy.deepspeed import get_active_deepspeed_plugin

__all__ = (
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
    "map_pytorch_optim_to_deepspeed",
)

serve(__name__)
