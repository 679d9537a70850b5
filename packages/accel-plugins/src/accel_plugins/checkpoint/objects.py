"""One object in one file: written by the processes that write files, and read so that nothing in it runs code."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accel_bigmodel.weight_files import load_weights_file, save_weights_file
from accel_bigmodel.weight_files.names import is_safetensors
from accel_plugins.checkpoint import pickled
from accel_state import current
from accel_state.errors import UnknownKind

__all__ = ("load", "save")


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write an object, on the main process alone.

    A file that was there stays as it was until the new one is complete.

    Args:
        obj: what is written; a mapping of names to tensors with `safe_serialization`.
        f: path of the file, or an open file.
        save_on_each_node: write on the main process of each node, for nodes that share no file system.
        safe_serialization: safetensors in place of `torch.save`.

    Raises:
        CheckpointError: it cannot be written.
        UnknownKind: it is not a mapping of names to tensors, the only content of safetensors.
    """
    topology = current.process_or_start().topology
    if not (topology.is_local_main if save_on_each_node else topology.rank == 0):
        return
    if safe_serialization:
        _write_safely(obj, f)
    elif isinstance(f, (str, os.PathLike)):
        _replace(Path(f), lambda path: pickled.write(obj, path))
    else:
        torch.save(obj, f)


def _write_safely(obj: Any, f: Any) -> None:
    if not isinstance(obj, Mapping) or not isinstance(f, (str, os.PathLike)):
        raise UnknownKind(
            f"Cannot save a {type(obj).__name__} with safe_serialization=True.",
            "safetensors holds a mapping of names to tensors, in a file with a path.",
            "Give such a mapping and a path, or leave safe_serialization out.",
        )
    path = Path(f)
    if is_safetensors(path):
        save_weights_file(obj, path)
    else:
        _replace(path, lambda beside: save_weights_file(obj, beside), suffix=".safetensors")


def _replace(path: Path, write: Any, suffix: str = "") -> None:
    """Write beside a name, and rename when that is complete."""
    beside = path.with_name(f".{path.name}.tmp-{os.urandom(8).hex()}{suffix}")
    try:
        write(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Read what `save` wrote: tensors, numbers, texts and containers of them.

    Args:
        f: path of the file, or an open file.
        map_location: where tensors are read to; where they were when None.
        kwargs: for `torch.load`; `weights_only=False` reads any pickle, which may run code that the file brings.

    Raises:
        CheckpointError: the file is missing, damaged, or holds more than plain data.
    """
    trusted = not kwargs.pop("weights_only", True)
    if not isinstance(f, (str, os.PathLike)):
        if trusted:
            return torch.load(f, map_location=map_location, weights_only=False, **kwargs)
        rest = io.BytesIO(f.read()) if f.tell() else f
        return pickled.read_open(rest, str(getattr(f, "name", "an open file")), map_location, **kwargs)
    path = Path(f)
    if is_safetensors(path):
        return load_weights_file(path, map_location or "cpu")
    return pickled.read(path, map_location, trusted=trusted, **kwargs)
