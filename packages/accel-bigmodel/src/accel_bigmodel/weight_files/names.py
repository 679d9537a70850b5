"""Weight files without torch: their names and the index that lists them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from accel_state.errors import CheckpointError
from accel_state.untrusted import dict_of, path_inside, printable, read_json, record, text

__all__ = (
    "MODEL_NAME",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
    "WeightIndex",
    "index_name",
    "is_safetensors",
    "read_index",
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


_WEIGHT_MAP: Final = dict_of(text())
_SHAPE: Final = record({"weight_map": _WEIGHT_MAP})


def _index_shape(value: Any) -> str:
    """The shape of an index: with a weight map and metadata, or the weight map alone."""
    return "" if value and not _WEIGHT_MAP(value) else _SHAPE(value)


@dataclass(frozen=True)
class WeightIndex:
    """Weight name to file name, relative to the folder of the index, and the size of all weights in bytes."""

    weight_map: Mapping[str, str]
    total_size: int

    def text(self) -> str:
        """The index as JSON: two spaces of indentation, sorted keys, a newline at the end."""
        document = {"metadata": {"total_size": self.total_size}, "weight_map": dict(self.weight_map)}
        return json.dumps(document, indent=2, sort_keys=True) + "\n"

    def names_by_file(self) -> dict[str, list[str]]:
        """The inverse map: file name to the weights in it."""
        files: dict[str, list[str]] = {}
        for name, file in self.weight_map.items():
            files.setdefault(file, []).append(name)
        return files


def read_index(path: str | os.PathLike[str]) -> WeightIndex:
    """Read and check an index: every file in it must exist, in its folder or below.

    Some tools write the weight map alone, without metadata around it.

    Raises:
        CheckpointError: the index cannot be read, has no weight map, or lists files that are missing or outside its
            folder.
    """
    path = Path(path)
    try:
        document = read_json(path, _index_shape)
    except OSError as error:
        raise _bad_index(path, f"It cannot be read: {error}.") from error
    except ValueError as error:
        raise _bad_index(path, f"It is damaged. {error}") from error
    if "weight_map" not in document or isinstance(document["weight_map"], str):
        document = {"weight_map": document}
    weight_map = document["weight_map"]
    files = dict.fromkeys(weight_map.values())
    try:
        # A download cache stores files elsewhere and links to them.
        missing = sorted(file for file in files if not os.path.isfile(path_inside(path.parent, file, links_out=True)))
    except ValueError as error:
        raise _bad_index(path, f"It lists a file outside its folder: {error}.") from error
    if missing:
        some = ", ".join(f"{file:.200}" for file in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise _bad_index(path, f"{len(missing)} of the {len(files)} files that it lists are missing: {some}.")
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return WeightIndex(weight_map, int(total) if isinstance(total, int) else 0)


def _bad_index(path: Path, obstacle: str) -> CheckpointError:
    return CheckpointError(
        f"Cannot read the weights listed in {str(path)!r}.",
        printable(obstacle),
        "Download the index and all of its files again into one folder.",
    )
