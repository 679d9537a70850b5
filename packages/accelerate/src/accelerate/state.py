"""What is found at the old address `accelerate.state`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_state.affinity import set_numa_affinity as set_numa_affinity
    from accel_state.availability import is_datasets_available as is_datasets_available
    from accel_state.availability import is_deepspeed_available as is_deepspeed_available
    from accel_state.availability import is_fp8_available as is_fp8_available
    from accel_state.availability import is_habana_gaudi1 as is_habana_gaudi1
    from accel_state.availability import is_hpu_available as is_hpu_available
    from accel_state.availability import is_mlu_available as is_mlu_available
    from accel_state.availability import is_mps_available as is_mps_available
    from accel_state.availability import is_musa_available as is_musa_available
    from accel_state.availability import is_neuron_available as is_neuron_available
    from accel_state.availability import is_npu_available as is_npu_available
    from accel_state.availability import is_sdaa_available as is_sdaa_available
    from accel_state.availability import is_torch_xla_available as is_torch_xla_available
    from accel_state.availability import is_xccl_available as is_xccl_available
    from accel_state.availability import is_xpu_available as is_xpu_available
    from accel_state.devices.cuda import check_cuda_fp8_capability as check_cuda_fp8_capability
    from accel_state.devices.nvidia import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
    from accel_state.environment import get_cpu_distributed_information as get_cpu_distributed_information
    from accel_state.environment import get_int_from_env as get_int_from_env
    from accel_state.environment import parse_choice_from_env as parse_choice_from_env
    from accel_state.environment import parse_flag_from_env as parse_flag_from_env
    from accel_state.gradient import GradientAccumulationPlugin as GradientAccumulationPlugin
    from accel_state.gradient import GradientState
    from accel_state.labels import DistributedType as DistributedType
    from accel_state.labels import DynamoBackend as DynamoBackend
    from accel_state.labels import SageMakerDistributedType as SageMakerDistributedType
    from accel_state.process import PartialState, do_nothing
    from accel_state.run_state import AcceleratorState, is_initialized
    from accel_state.shared import SharedDict, ThreadLocalSharedDict

__all__ = (
    "AcceleratorState",
    "GradientState",
    "PartialState",
    "SharedDict",
    "ThreadLocalSharedDict",
    "do_nothing",
    "is_initialized",
)

serve(__name__)
