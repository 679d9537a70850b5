"""What is found at the old address `accelerate.utils.other`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_bigmodel.byte_counts import convert_bytes
    from accel_bigmodel.tied import id_tensor_storage as id_tensor_storage
    from accel_plugins.wrapped.unwrap import extract_model_from_parallel, is_compiled_module
    from accel_state.labels import DistributedType as DistributedType
    from accel_state.process import PartialState as PartialState
    from accel_state.process import wait_for_everyone
    from accel_state.settings.versions import is_torch_version as is_torch_version

__all__ = ("convert_bytes", "extract_model_from_parallel", "is_compiled_module", "wait_for_everyone")

serve(__name__)
