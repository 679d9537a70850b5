"""What is found at the old address `accelerate.utils.other`.

Written by tools/gen_alias.py from accelerate/names: change that table, not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.address import serve

if TYPE_CHECKING:
    from accel_bigmodel.byte_counts import convert_bytes
    from accel_bigmodel.tied import id_tensor_storage as id_tensor_storage
    from accel_plugins.blocks import has_repeated_blocks, is_repeated_blocks
    from accel_plugins.transforms.compile import compile_regions, has_compiled_regions
    from accel_plugins.wrapped.unwrap import extract_model_from_parallel, is_compiled_module
    from accel_state.labels import DistributedType as DistributedType
    from accel_state.process import PartialState as PartialState
    from accel_state.process import wait_for_everyone
    from accel_state.settings.versions import is_torch_version as is_torch_version

__all__ = (
    "compile_regions",
    "convert_bytes",
    "extract_model_from_parallel",
    "has_compiled_regions",
    "has_repeated_blocks",
    "is_compiled_module",
    "is_repeated_blocks",
    "wait_for_everyone",
)

serve(__name__)
