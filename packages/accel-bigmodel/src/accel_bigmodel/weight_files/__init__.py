"""Weight files: their names, and writing and reading them in safetensors or torch format, in one file or in shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state.lazy import lazy_names

if TYPE_CHECKING:
    from accel_bigmodel.tied import tied_names
    from accel_bigmodel.weight_files.header import Entry, Header, read_header
    from accel_bigmodel.weight_files.index import WeightIndex, read_index
    from accel_bigmodel.weight_files.names import (
        MODEL_NAME,
        SAFE_MODEL_NAME,
        SAFE_WEIGHTS_INDEX_NAME,
        SAFE_WEIGHTS_NAME,
        SAFE_WEIGHTS_PATTERN_NAME,
        WEIGHTS_INDEX_NAME,
        WEIGHTS_NAME,
        WEIGHTS_PATTERN_NAME,
        index_name,
        is_safetensors,
        shard_name,
        shards_of,
        weights_name,
    )
    from accel_bigmodel.weight_files.reading import (
        WeightFile,
        WeightSource,
        find_weights,
        load_weights,
        load_weights_file,
    )
    from accel_bigmodel.weight_files.sharding import WeightShards, split_state_dict, stored_names
    from accel_bigmodel.weight_files.writing import save_weights, save_weights_file

__all__ = (
    "MODEL_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
    "Entry",
    "Header",
    "WeightFile",
    "WeightIndex",
    "WeightShards",
    "WeightSource",
    "find_weights",
    "index_name",
    "is_safetensors",
    "load_weights",
    "load_weights_file",
    "read_header",
    "read_index",
    "save_weights",
    "save_weights_file",
    "shard_name",
    "shards_of",
    "split_state_dict",
    "stored_names",
    "tied_names",
    "weights_name",
)

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "accel_bigmodel.tied": ("tied_names",),
        "accel_bigmodel.weight_files.header": ("Entry", "Header", "read_header"),
        "accel_bigmodel.weight_files.index": ("WeightIndex", "read_index"),
        "accel_bigmodel.weight_files.names": (
            "MODEL_NAME",
            "SAFE_MODEL_NAME",
            "SAFE_WEIGHTS_INDEX_NAME",
            "SAFE_WEIGHTS_NAME",
            "SAFE_WEIGHTS_PATTERN_NAME",
            "WEIGHTS_INDEX_NAME",
            "WEIGHTS_NAME",
            "WEIGHTS_PATTERN_NAME",
            "index_name",
            "is_safetensors",
            "shard_name",
            "shards_of",
            "weights_name",
        ),
        "accel_bigmodel.weight_files.reading": (
            "WeightFile",
            "WeightSource",
            "find_weights",
            "load_weights",
            "load_weights_file",
        ),
        "accel_bigmodel.weight_files.sharding": ("WeightShards", "split_state_dict", "stored_names"),
        "accel_bigmodel.weight_files.writing": ("save_weights", "save_weights_file"),
    },
)
