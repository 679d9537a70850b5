"""Models larger than memory: weight files, device maps, offload and meta initialisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.settings.lazy import lazy_names

if TYPE_CHECKING:
    from accel_bigmodel.byte_counts import (
        convert_bytes,
        convert_file_size_to_int,
    )
    from accel_bigmodel.tied import (
        id_tensor_storage,
        tied_names,
    )
    from accel_bigmodel.weight_files import (
        SAFE_WEIGHTS_INDEX_NAME,
        SAFE_WEIGHTS_NAME,
        WEIGHTS_INDEX_NAME,
        WEIGHTS_NAME,
        Shards,
        find_weights,
        load_weights,
        load_weights_file,
        save_weights,
        save_weights_file,
        split_state_dict,
    )

__all__ = (
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "Shards",
    "convert_bytes",
    "convert_file_size_to_int",
    "find_weights",
    "id_tensor_storage",
    "load_weights",
    "load_weights_file",
    "save_weights",
    "save_weights_file",
    "split_state_dict",
    "tied_names",
)

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "accel_bigmodel.byte_counts": (
            "convert_bytes",
            "convert_file_size_to_int",
        ),
        "accel_bigmodel.tied": (
            "id_tensor_storage",
            "tied_names",
        ),
        "accel_bigmodel.weight_files": (
            "SAFE_WEIGHTS_INDEX_NAME",
            "SAFE_WEIGHTS_NAME",
            "Shards",
            "WEIGHTS_INDEX_NAME",
            "WEIGHTS_NAME",
            "find_weights",
            "load_weights",
            "load_weights_file",
            "save_weights",
            "save_weights_file",
            "split_state_dict",
        ),
    },
)
