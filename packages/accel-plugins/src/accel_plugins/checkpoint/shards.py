"""Folders of shards of `torch.distributed.checkpoint`: read by all processes together, or whole by each alone.

torch reads their `.metadata`, and the values among the tensors, with pickle; both are checked by a reader that knows
nothing but plain data before torch gets to see them.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from accel_bigmodel.weight_files.torch_files import check_torch_file
from accel_ops.pickle_check import demand
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.allowed import read_metadata
from accel_plugins.checkpoint.manifest import walk
from accel_state.errors import AccelError, CheckpointError

__all__ = ("PortableWriter", "check_objects", "names_in", "read_into", "read_whole")


class PortableWriter(FileSystemWriter):
    """Stores the paths of shards as text, because another system or Python may not read a pickled path."""

    def storage_meta(self) -> StorageMeta | None:
        """What stands in the `.metadata` besides the tensors."""
        meta = super().storage_meta()
        if meta is not None:
            meta.checkpoint_id = str(meta.checkpoint_id)
        return meta


class _Record(io.RawIOBase):
    """A part of an open file; that of torch does not find its own end."""

    def __init__(self, file: Any, begin: int, length: int) -> None:
        super().__init__()
        self._file, self._begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position of the part."""
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read from there."""
        memory = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._begin + self._at)
        count: int = self._file.readinto(memory) if memory else 0
        self._at += count
        return count


class _PlainReader(FileSystemReader):
    """Reads what was looked through: the description that is given, and records of plain data."""

    def __init__(self, source: Path) -> None:
        super().__init__(source)
        self._described = read_metadata(source / ".metadata")

    # Without the rank that torch asks for, it does not turn to the files that single ranks may have written.
    def read_metadata(self) -> Metadata:
        """What the folder holds."""
        self._described.storage_meta = self._described.storage_meta or StorageMeta()
        self._described.storage_meta.load_id = self.load_id
        return self._described

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        demand(sinfo.offset + sinfo.length <= os.fstat(file.fileno()).st_size, "the file is shorter than it should be")
        record = io.BufferedReader(_Record(file, sinfo.offset, sinfo.length))
        check_torch_file(record)
        record.seek(0)
        return record


class _PlainLoadPlanner(DefaultLoadPlanner):
    """Refuses values among the tensors that are more than plain data."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        pickled.read_open(value, read_item.dest_index.fqn)
        value.seek(0)
        super().load_bytes(read_item, value)


def read_into(state: dict[str, Any], source: Path, *, alone: bool = False) -> None:
    """Read what a state dict names into its tensors, whatever shards they are; called on every process.

    Args:
        state: as it was saved, with tensors of the same names and shapes.
        source: the folder of shards.
        alone: this process reads by itself.

    Raises:
        CheckpointError: the shards are incomplete or damaged, belong to something else, or hold more than plain data.
    """
    _demand_regular(source)
    reader = _PlainReader(source)
    try:
        with warnings.catch_warnings():
            # Alone is how it is meant.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(state, storage_reader=reader, planner=_PlainLoadPlanner(), no_dist=alone)
    except AccelError:
        raise
    except (Exception, CheckpointException) as error:  # a damaged file can make its reader raise anything
        raise CheckpointError(
            f"Cannot load {source.name} of {source.parent}.",
            f"It is damaged or belongs to something else: {(str(error).strip().splitlines() or [''])[-1]}",
            "Load an older checkpoint, or build what it was saved from.",
        ) from error


def check_objects(source: Path) -> None:
    """Refuse shards that hold more than plain data, for an engine that reads them by itself.

    Args:
        source: the folder of shards.

    Raises:
        CheckpointError: the description or a value is damaged or more than plain data, or its file is not there.
    """
    _demand_regular(source)
    metadata = read_metadata(source / ".metadata")
    values = {name for name, kind in metadata.state_dict_metadata.items() if isinstance(kind, BytesStorageMetadata)}
    for index, place in (metadata.storage_data or {}).items():
        if index.fqn in values:
            pickled.read_open(_value(source, index.fqn, place), index.fqn)


def _value(source: Path, name: str, place: Any) -> io.BytesIO:
    """One value as it stands in its file."""
    asked = f"Cannot read {name!r} from {place.relative_path} of {source}."
    try:
        with open(source / place.relative_path, "rb") as shard:
            if place.offset + place.length > os.fstat(shard.fileno()).st_size:
                raise EOFError("it is shorter than it should be")
            shard.seek(place.offset)
            return io.BytesIO(shard.read(place.length))
    except (OSError, EOFError) as error:
        remedy = "The folder is incomplete: load an older checkpoint."
        raise CheckpointError(asked, f"The file cannot be read: {error}", remedy) from error


def names_in(source: Path) -> list[str]:
    """Names of everything in a folder of shards.

    Raises:
        CheckpointError: as `read_into`.
    """
    return list(read_metadata(source / ".metadata").state_dict_metadata)


def read_whole(source: Path) -> dict[str, Any]:
    """Everything in a folder of shards, put together on this process and nested as it was saved.

    Raises:
        CheckpointError: as `read_into`.
    """
    _demand_regular(source)
    described = read_metadata(source / ".metadata")
    _demand_room(source, described)
    flat: dict[str, Any] = {
        name: torch.empty(one.size, dtype=one.properties.dtype) if isinstance(one, TensorStorageMetadata) else None
        for name, one in described.state_dict_metadata.items()
    }
    read_into(flat, source, alone=True)
    paths = described.planner_data or {}
    whole: dict[Any, Any] = {}
    for name, value in flat.items():
        _put(whole, paths.get(name, (name,)), value)
    found: dict[str, Any] = _with_lists(whole)
    return found


def _demand_regular(source: Path) -> None:
    """Refuse a folder with pipes or devices, which would keep torch's reader waiting."""
    for path in walk(source):
        if path.exists() and not path.is_file():
            raise CheckpointError(
                f"Load the shards in {source}.", f"{path.name} is not a regular file.", "Load an older checkpoint."
            )


def _demand_room(source: Path, described: Metadata) -> None:
    """Refuse tensors that are larger than the files: memory for them is allocated before anything is read."""
    tensors = [one for one in described.state_dict_metadata.values() if isinstance(one, TensorStorageMetadata)]
    wanted = sum(math.prod(one.size) * one.properties.dtype.itemsize for one in tensors)
    there = sum(path.stat().st_size for path in source.iterdir() if path.is_file())
    if wanted > there:
        raise CheckpointError(
            f"Cannot merge the shards in {source}.",
            f"They describe tensors of {wanted} bytes, and the files have {there}.",
            "The folder is incomplete or damaged: load an older checkpoint.",
        )


def _put(whole: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    *above, last = path
    for step in above:
        whole = whole.setdefault(step, {})
    whole[last] = value


def _with_lists(item: Any) -> Any:
    """Mappings whose keys are all numbers were lists."""
    if not isinstance(item, dict):
        return item
    inner = {key: _with_lists(value) for key, value in item.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner
