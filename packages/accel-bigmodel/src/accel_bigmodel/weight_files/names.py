"""Names of weight files, of their shards and of the index that lists them."""

from __future__ import annotations

import re
from typing import Final

__all__ = (
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
    "shard_pattern",
    "weights_name",
)

SAFE_MODEL_NAME: Final = "model"
SAFE_WEIGHTS_NAME: Final = "model.safetensors"
SAFE_WEIGHTS_INDEX_NAME: Final = "model.safetensors.index.json"
SAFE_WEIGHTS_PATTERN_NAME: Final = "model{suffix}.safetensors"
MODEL_NAME: Final = "pytorch_model"
WEIGHTS_NAME: Final = "pytorch_model.bin"
WEIGHTS_INDEX_NAME: Final = "pytorch_model.bin.index.json"
WEIGHTS_PATTERN_NAME: Final = "pytorch_model{suffix}.bin"


def weights_name(safe_serialization: bool = True, number: int = 0) -> str:
    """File name of the weights of a model: `model.safetensors` for number 0, then `model_1.safetensors` and so on."""
    pattern = SAFE_WEIGHTS_PATTERN_NAME if safe_serialization else WEIGHTS_PATTERN_NAME
    return pattern.format(suffix=f"_{number}" if number else "")


def shard_name(name: str, number: int, count: int) -> str:
    """File name of shard `number` (from 1) of `count`: `model-00001-of-00002.safetensors`."""
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-{number:05d}-of-{count:05d}{dot}{suffix}"


def shard_pattern(name: str) -> re.Pattern[str]:
    """A pattern that matches every shard of a file name, for any number of shards."""
    stem, dot, suffix = name.rpartition(".")
    return re.compile(rf"{re.escape(stem)}-\d{{5,}}-of-\d{{5,}}{re.escape(dot + suffix)}")


def index_name(name: str) -> str:
    """File name of the index that lists the shards of a file name: `model.safetensors.index.json`."""
    return f"{name}.index.json"


def is_safetensors(name: object) -> bool:
    """Whether a file name or path has the suffix of the safetensors format."""
    return str(name).endswith(".safetensors")
