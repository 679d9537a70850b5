"""The index of an offload folder: what lies there, and where weights lie that were left in their checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from accel_bigmodel.byte_counts import convert_bytes
from accel_state.errors import CheckpointError

__all__ = ("INDEX_NAME", "read_offload_index", "save_offload_index", "weight_file")

INDEX_NAME: Final = "index.json"


def weight_file(folder: str | os.PathLike[str], name: str) -> Path:
    """The file of an offloaded weight.

    Raises:
        CheckpointError: the name would lead out of the folder.
    """
    if not name or any(mark in name for mark in ("/", "\\", "\0")):
        raise _bad(Path(folder), f"{name!r} cannot be the name of a weight: it would be a path.")
    return Path(folder) / f"{name}.dat"


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
    beside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
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
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise _bad(path, f"It cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"It is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise _bad(path, f"It holds a JSON {type(document).__name__}, not an object.")
    for name, entry in document.items():
        weight_file(folder, name)
        if not _is_entry(entry):
            raise _bad(path, f"Its entry {name!r} is {entry!r:.200}.")
    return document


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    if "safetensors_file" in entry:
        return all(isinstance(entry.get(key, ""), str) for key in ("safetensors_file", "weight_name", "dtype"))
    shape = entry.get("shape")
    sizes_fit = isinstance(shape, list) and all(type(size) is int and 0 <= size < 2**63 for size in shape)
    return sizes_fit and isinstance(entry.get("dtype"), str)


def _bad(path: Path, obstacle: str) -> CheckpointError:
    return CheckpointError(
        f"Read the offloaded weights listed in {str(path)!r}.",
        obstacle,
        "Offload the model again into an empty folder.",
    )
