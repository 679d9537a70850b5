"""What is found at the old address `accelerate.parallelism_config`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_state.labels import DistributedType as DistributedType
    from accel_state.mesh import ParallelismConfig
    from accel_state.mesh_handlers import DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig
    from accel_state.mesh_handlers import TorchContextParallelConfig as TorchContextParallelConfig
    from accel_state.mesh_handlers import TorchTensorParallelConfig as TorchTensorParallelConfig
    from accel_state.settings.versions import is_torch_version as is_torch_version

__all__ = ("ParallelismConfig",)

serve(__name__)
