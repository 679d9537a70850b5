"""What is found at the old address `accelerate.utils.modeling`.

Written by tools/gen_alias.py from accelerate/names.py: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_bigmodel.byte_counts import convert_file_size_to_int
    from accel_bigmodel.tied import id_tensor_storage
    from accel_bigmodel.weight_files.names import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
    from accel_bigmodel.weight_files.names import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
    from accel_bigmodel.weight_files.names import WEIGHTS_NAME as WEIGHTS_NAME
    from accel_plugins.precision.config import AutocastKwargs as AutocastKwargs
    from accel_state.console import tqdm as tqdm
    from accel_state.labels import CustomDtype as CustomDtype
    from accel_state.labels import DistributedType as DistributedType
    from accel_state.run_state import AcceleratorState as AcceleratorState
    from accel_state.settings.versions import is_torch_version as is_torch_version

__all__ = ("convert_file_size_to_int", "id_tensor_storage")

serve(__name__)
