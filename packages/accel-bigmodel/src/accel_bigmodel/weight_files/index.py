"""The index of a sharded checkpoint: which weight lies in which file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from accel_state.errors import CheckpointError
from accel_state.untrusted import dict_of, path_inside, printable, read_json, record, text

__all__ = ("WeightIndex", "read_index")

_SHAPE: Final = record({"weight_map": dict_of(text())})


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
    try:
        document = read_json(path, _SHAPE)
    except OSError as error:
        raise _bad_index(path, f"It cannot be read: {error}.") from error
    except ValueError as error:
        raise _bad_index(path, f"It is damaged. {error}") from error
    weight_map = document["weight_map"]
    files = dict.fromkeys(weight_map.values())
    try:
        # A download cache keeps files elsewhere and links to them.
        missing = sorted(file for file in files if not os.path.isfile(path_inside(path.parent, file, links_out=True)))
    except ValueError as error:
        raise _bad_index(path, f"It places a weight elsewhere: {error}.") from error
    if missing:
        some = ", ".join(f"{file:.200}" for file in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise _bad_index(path, f"{len(missing)} of the {len(files)} files it names are missing: {some}.")
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return WeightIndex(weight_map, int(total) if isinstance(total, int) else 0)


def _bad_index(path: Path, obstacle: str) -> CheckpointError:
    return CheckpointError(
        f"Read the weights listed in {str(path)!r}.",
        printable(obstacle),
        "Fetch the index and all of its files again into one folder.",
    )
