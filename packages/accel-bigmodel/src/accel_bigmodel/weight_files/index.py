"""The index of a sharded checkpoint: which weight lies in which file."""

from __future__ import annotations

import json
import ntpath
import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_state.errors import CheckpointError

__all__ = ("WeightIndex", "read_index")


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
        """The same map from the other end: file name to the weights in it."""
        files: dict[str, list[str]] = {}
        for name, file in self.weight_map.items():
            files.setdefault(file, []).append(name)
        return files


def read_index(path: str | os.PathLike[str]) -> WeightIndex:
    """Read an index and check it: every file it names lies in its folder, or below, and exists.

    Raises:
        CheckpointError: the index cannot be read, has no weight map, or names files that are missing or lie elsewhere.
    """
    path = Path(path)
    document = _parse(path)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict):
        raise _bad_index(path, "It has no 'weight_map' that says which weight lies in which file.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _stays_inside(file):
            raise _bad_index(path, f"It places {name!r} in {file!r}, which is no file in or below its folder.")
    missing = sorted(file for file in set(weight_map.values()) if not (path.parent / file).is_file())
    if missing:
        some = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise _bad_index(
            path, f"{len(missing)} of the {len(set(weight_map.values()))} files it names are missing: {some}."
        )
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return WeightIndex(weight_map, int(total) if isinstance(total, int) else 0)


def _bad_index(path: Path, obstacle: str) -> CheckpointError:
    return CheckpointError(
        f"Read the weights listed in {str(path)!r}.",
        obstacle,
        "Fetch the index and all of its files again into one folder.",
    )


def _parse(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise _bad_index(path, f"It cannot be read: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise _bad_index(path, f"It is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise _bad_index(path, f"It holds a JSON {type(document).__name__}, not an object.")
    return document


def _stays_inside(file: str) -> bool:
    """Whether a name, read by the rules of either system, leads into or below the folder it is relative to.

    Decided by the text alone: files that are links into a download cache are fine.
    """
    if not file or "\0" in file or ntpath.isabs(file) or posixpath.isabs(file) or ntpath.splitdrive(file)[0]:
        return False
    return ".." not in file.replace("\\", "/").split("/")
