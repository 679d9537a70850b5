"""What is found at the old address `accelerate.utils.fsdp_utils`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_bigmodel.sizes import get_non_persistent_buffers as get_non_persistent_buffers
    from accel_bigmodel.weight_files.names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
    from accel_bigmodel.weight_files.names import WEIGHTS_NAME as WEIGHTS_NAME
    from accel_plugins.blocks import get_module_class_from_name as get_module_class_from_name
    from accel_plugins.checkpoint.files import FSDP_MODEL_NAME as FSDP_MODEL_NAME
    from accel_plugins.checkpoint.files import OPTIMIZER_NAME as OPTIMIZER_NAME
    from accel_plugins.checkpoint.objects import save as save
    from accel_plugins.fsdp.merge import merge_weights as merge_fsdp_weights
    from accel_plugins.wrapped.unwrap import is_compiled_module as is_compiled_module
    from accel_state.logging import get_logger as get_logger
    from accel_state.settings.versions import is_torch_version as is_torch_version
    from accelerate.legacy.fsdp import (
        disable_fsdp_ram_efficient_loading,
        enable_fsdp_ram_efficient_loading,
        ensure_weights_retied,
        fsdp2_apply_ac,
        fsdp2_canonicalize_names,
        fsdp2_load_full_state_dict,
        fsdp2_prepare_auto_wrap_policy,
        fsdp2_prepare_model,
        fsdp2_switch_optimizer_parameters,
        get_fsdp2_grad_scaler,
        get_parameters_from_modules,
    )
    from accelerate.legacy.fsdp_checkpoints import (
        load_fsdp_model,
        load_fsdp_optimizer,
        save_fsdp_model,
        save_fsdp_optimizer,
    )
    from accelerate.legacy.models import is_peft_model as is_peft_model
    from accelerate.legacy.weights import get_module_children_bottom_up as get_module_children_bottom_up

__all__ = (
    "disable_fsdp_ram_efficient_loading",
    "enable_fsdp_ram_efficient_loading",
    "ensure_weights_retied",
    "fsdp2_apply_ac",
    "fsdp2_canonicalize_names",
    "fsdp2_load_full_state_dict",
    "fsdp2_prepare_auto_wrap_policy",
    "fsdp2_prepare_model",
    "fsdp2_switch_optimizer_parameters",
    "get_fsdp2_grad_scaler",
    "get_parameters_from_modules",
    "load_fsdp_model",
    "load_fsdp_optimizer",
    "merge_fsdp_weights",
    "save_fsdp_model",
    "save_fsdp_optimizer",
)

serve(__name__)
