"""What is found at the old address `accelerate.utils.constants`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_bigmodel.casting import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
    from accel_bigmodel.weight_files.names import (
        MODEL_NAME,
        SAFE_MODEL_NAME,
        SAFE_WEIGHTS_INDEX_NAME,
        SAFE_WEIGHTS_NAME,
        SAFE_WEIGHTS_PATTERN_NAME,
        WEIGHTS_INDEX_NAME,
        WEIGHTS_NAME,
        WEIGHTS_PATTERN_NAME,
    )
    from accel_plugins.checkpoint.files import (
        FSDP_MODEL_NAME,
        OPTIMIZER_NAME,
        RNG_STATE_NAME,
        SAMPLER_NAME,
        SCALER_NAME,
        SCHEDULER_NAME,
    )
    from accel_state.labels import CUDA_DISTRIBUTED_TYPES, TORCH_DISTRIBUTED_OPERATION_TYPES
    from accel_state.mesh_handlers import (
        BETA_CP_AVAILABLE_PYTORCH_VERSION,
        BETA_SP_AVAILABLE_DEEPSPEED_VERSION,
        BETA_TP_AVAILABLE_PYTORCH_VERSION,
        BETA_TP_AVAILABLE_TRANSFORMERS_VERSION,
    )

__all__ = (
    "BETA_CP_AVAILABLE_PYTORCH_VERSION",
    "BETA_SP_AVAILABLE_DEEPSPEED_VERSION",
    "BETA_TP_AVAILABLE_PYTORCH_VERSION",
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION",
    "CUDA_DISTRIBUTED_TYPES",
    "FSDP_MODEL_NAME",
    "MODEL_NAME",
    "OPTIMIZER_NAME",
    "RNG_STATE_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME",
    "SAMPLER_NAME",
    "SCALER_NAME",
    "SCHEDULER_NAME",
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING",
    "TORCH_DISTRIBUTED_OPERATION_TYPES",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
)

serve(__name__)
