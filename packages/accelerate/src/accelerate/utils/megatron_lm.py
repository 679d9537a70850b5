"""What is found at the old address `accelerate.utils.megatron_lm`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_plugins.megatron.engine import MegatronEngine
    from accel_plugins.megatron.parallel import (
        avg_losses_across_data_parallel_group,
        gather_across_data_parallel_groups,
    )
    from accel_plugins.megatron.stand_ins import MegatronLMDummyDataLoader, MegatronLMDummyScheduler
    from accel_plugins.megatron.train_steps import AbstractTrainStep, BertTrainStep, GPTTrainStep, T5TrainStep
    from accel_plugins.megatron.wrappers import MegatronLMOptimizerWrapper, MegatronLMSchedulerWrapper
    from accelerate.legacy.megatron import (
        finish_mpu_init,
        initialize,
        model_provider_func,
        prepare_data_loader,
        prepare_model_optimizer_scheduler,
        prepare_optimizer,
        prepare_scheduler,
    )

__all__ = (
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronEngine",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMOptimizerWrapper",
    "MegatronLMSchedulerWrapper",
    "T5TrainStep",
    "avg_losses_across_data_parallel_group",
    "finish_mpu_init",
    "gather_across_data_parallel_groups",
    "initialize",
    "model_provider_func",
    "prepare_data_loader",
    "prepare_model_optimizer_scheduler",
    "prepare_optimizer",
    "prepare_scheduler",
)

serve(__name__)
