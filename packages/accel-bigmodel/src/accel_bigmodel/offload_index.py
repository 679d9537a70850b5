"""The index of an offload folder: what lies there, and where weights lie that were left in their checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from accel_bigmodel.byte_counts import convert_bytes
from accel_state.errors import CheckpointError
from accel_state.untrusted import inside, integer, list_of, printable, read_json, record, shown, table_of, text

__all__ = ("INDEX_NAME", "read_offload_index", "save_offload_index", "weight_file")

INDEX_NAME: Final = "index.json"
_MOST_DIMENSIONS: Final = 64
_WRITTEN: Final = record({"dtype": text(), "shape": list_of(integer(), _MOST_DIMENSIONS)})
_LEFT: Final = record({"safetensors_file": text()}, {"weight_name": text(), "dtype": text()})


def weight_file(folder: str | os.PathLike[str], name: str) -> Path:
    """The file of an offloaded weight.

    Raises:
        CheckpointError: the name would lead out of the folder.
    """
    try:
        if not name or "/" in name:
            raise ValueError(f"{shown(name)} is not the name of a file in the folder")
        return Path(inside(folder, f"{name}.dat", links_out=True))
    except ValueError as error:
        raise _bad(Path(folder), f"A weight has an impossible name: {error}.") from error


def save_offload_index(index: Mapping[str, Mapping[str, Any]], offload_folder: str | os.PathLike[str]) -> None:
    """Write an index, merged with one that is there already; nothing is written for an empty one.

    Raises:
        CheckpointError: the index that is there cannot be read, or the disk refuses.
    """
    if not index:
        return
    path = Path(offload_folder) / INDEX_NAME
    merged = {**(read_offload_index(offload_folder) if path.is_file() else {}), **index}
    text = json.dumps(merged, indent=2)
    beside = path.with_name(f".{path.name}.tmp-{os.urandom(8).hex()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise CheckpointError(
            f"Write {str(path)!r} ({convert_bytes(len(text))}).",
            f"{type(error).__name__}: {error}",
            "Name an offload folder with free space where you may write.",
        ) from error
    finally:
        beside.unlink(missing_ok=True)


def read_offload_index(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Read and check an index: weight name to `{"dtype", "shape"}`, or to `{"safetensors_file", ...}`.

    Raises:
        CheckpointError: it cannot be read, or an entry is neither.
    """
    path = Path(folder) / INDEX_NAME
    try:
        document: dict[str, dict[str, Any]] = read_json(path, table_of(_entry))
    except OSError as error:
        raise _bad(path, f"It cannot be read: {error}.") from error
    except ValueError as error:
        raise _bad(path, f"It is damaged. {error}") from error
    for name in document:
        weight_file(folder, name)
    return document


def _entry(value: Any) -> str:
    """Shape of an entry of either kind."""
    return (_LEFT if isinstance(value, dict) and "safetensors_file" in value else _WRITTEN)(value)


def _bad(path: Path, obstacle: str) -> CheckpointError:
    return CheckpointError(
        f"Read the offloaded weights listed in {str(path)!r}.",
        printable(obstacle),
        "Offload the model again into an empty folder.",
    )
