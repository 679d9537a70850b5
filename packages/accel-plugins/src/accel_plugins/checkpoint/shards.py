"""Folders of shards of `torch.distributed.checkpoint`: read by all processes together, or completely by one.

torch reads their `.metadata`, and values that are not tensors, with pickle. Here `.metadata` may use only the classes
that describe tensors and their positions, and values are read as plain data.
"""

from __future__ import annotations

import dataclasses
import io
import math
import mmap
import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from accel_bigmodel.failed_load import LoadGuard
from accel_bigmodel.tied import memory_of
from accel_bigmodel.weight_files.reading import TensorRecord, record_of_tensor
from accel_ops.restricted_pickle import load_restricted
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.files import walk
from accel_state.errors import AccelError, CheckpointError
from accel_state.untrusted import open_regular

__all__ = (
    "check_objects",
    "names_in",
    "names_in_metadata",
    "read_into",
    "read_metadata",
    "read_whole",
)

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILES: Final = "torch.distributed.checkpoint.filesystem"
_PLANS: Final = "torch.distributed.checkpoint.planner"

_CLASSES: Final = {
    **dict.fromkeys(
        (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        ),
        _METADATA,
    ),
    **dict.fromkeys(("_StorageInfo", "_StoragePrefix"), _FILES),
    **dict.fromkeys(("SavePlan", "WriteItem", "WriteItemType", "BytesIOWriteData", "TensorWriteData"), _PLANS),
}


class _Properties(TensorProperties):
    """The properties of a tensor as any torch writes them."""

    def __setstate__(self, state: Any) -> None:
        # torch 2.15 added the strides, and reads files of older versions, which cannot read its six properties.
        if len(state) > len(dataclasses.fields(TensorProperties)):
            raise ValueError("a newer torch wrote it: install torch 2.15 or newer")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__class__ = TensorProperties  # type: ignore[assignment]


@cache
def names_in_metadata() -> Mapping[tuple[str, str], Any]:
    """What descriptions of tensors consist of."""
    own = {(module, name): getattr(import_module(module), name) for name, module in _CLASSES.items()}
    dtypes = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    # The second is that of Python 3.13.
    paths = {(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")}
    windows = {(module, "WindowsPath"): PurePosixPath for module in ("pathlib", "pathlib._local")}
    plain = {("collections", "OrderedDict"): OrderedDict, ("torch", "Size"): torch.Size, ("builtins", "set"): set}
    own[_METADATA, "TensorProperties"] = _Properties
    return {**own, **dtypes, **paths, **windows, **plain, ("torch.serialization", "_get_layout"): _layout}


def _layout(name: str) -> torch.layout:
    found = getattr(torch, name.removeprefix("torch."))
    if not isinstance(found, torch.layout):
        raise ValueError(f"{name} is not a layout")
    return found


def _demand_description(described: Any) -> None:
    """Raise unless everything that describes tensors has all its fields."""
    _demand_whole(described, Metadata)
    for one in described.state_dict_metadata.values():
        _demand_whole(one, (TensorStorageMetadata, BytesStorageMetadata))
        if isinstance(one, TensorStorageMetadata):
            _demand_whole(one.properties, TensorProperties)
            for chunk in one.chunks:
                _demand_whole(chunk, ChunkStorageMetadata)
    for index, place in (described.storage_data or {}).items():
        _demand_whole(index, MetadataIndex)
        _demand_whole(place, _StorageInfo)


def _demand_whole(item: Any, kind: Any) -> None:
    if not isinstance(item, kind) or not all(hasattr(item, field.name) for field in dataclasses.fields(item)):
        raise ValueError("it is not a description of tensors")


def read_metadata(path: Path) -> Metadata:
    """Read a `.metadata` file that contains only descriptions of tensors.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file is missing or damaged, or contains anything else.
    """
    try:
        with BufferedReader(open_regular(path)) as file:
            content = file.read()
        described: Metadata = load_restricted(content, names_in_metadata())
        _demand_description(described)
        for place in (described.storage_data or {}).values():
            if place.relative_path in ("", ".", "..") or set(place.relative_path) & set("/\\:\0"):
                raise ValueError(f"it names the file {place.relative_path!r}, which leads out of the folder")
            if getattr(place, "transform_descriptors", None):
                raise ValueError("its files are compressed, or changed by an extension")
        return described
    except FileNotFoundError:
        raise CheckpointError(
            f"Cannot load the shards in {path.parent}.",
            f"{path.name} is not there.",
            "The folder is incomplete: load an older checkpoint.",
        ) from None
    except Exception as error:  # a damaged pickle can make its reader raise any error
        raise CheckpointError(
            f"Cannot load the shards in {path.parent}.",
            f"{path.name} is damaged or contains more than descriptions of tensors: {error}",
            "Load an older checkpoint that you trust.",
        ) from error


class _Record(io.RawIOBase):
    """A range of an open file; torch's own class does not detect the end of the range."""

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
        """Move to a position in the range."""
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read from the current position."""
        memory = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._begin + self._at)
        count: int = self._file.readinto(memory) if memory else 0
        self._at += count
        return count


class _PlainReader(FileSystemReader):
    """Reads checked data: the metadata of the folder, and records of plain data.

    Of each tensor it reads only the byte ranges of this process; torch would read every overlapping shard completely.
    The places of all tensors are known before the first one is written.

    Args:
        source: the folder of shards.
        guard: the guard of the load; its `writes` is set before the first tensor is written.
    """

    def __init__(self, source: Path, guard: LoadGuard | None = None) -> None:
        super().__init__(source)
        self._described = read_metadata(source / ".metadata")
        self._source = source
        self._guard = guard or LoadGuard()
        self._pages: dict[str, mmap.mmap] = {}
        self._found: dict[tuple[str, int], TensorRecord | None] = {}

    # Ignoring torch's argument `rank` prevents the use of metadata files of single ranks.
    def read_metadata(self) -> Metadata:
        """The metadata of the folder."""
        self._described.storage_meta = self._described.storage_meta or StorageMeta()
        self._described.storage_meta.load_id = self.load_id
        return self._described

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Read the planned items: parts of plain tensors from mapped files, everything else as torch does."""
        others = list[ReadItem]()
        filled: dict[tuple[Any, ...], tuple[ReadItem, Tensor, Tensor]] = {}
        for item in plan.items:
            target = planner.resolve_tensor(item).detach() if item.type is LoadItemType.TENSOR else None
            found = self._record_of(item)
            if target is None or found is None or target.layout != torch.strided or type(target) is not Tensor:
                others.append(item)
                continue
            ends = [start + size for start, size in zip(item.storage_offsets, item.lengths, strict=True)]
            inside = len(ends) == len(found.shape) and all(map(int.__le__, ends, found.shape))
            if not inside or target.shape != item.lengths:
                raise ValueError(f"{item.storage_index.fqn!r} has another shape")
            memory = (*memory_of(target), item.dest_offsets)
            # Tied weights have several names and the same memory.
            if memory not in filled:
                filled[memory] = item, target, self._mapped(item, found)
        self._guard.writes = True
        for item, target, part in filled.values():
            target.copy_(part)
            planner.commit_tensor(item, target)
        return super().read_data(dataclasses.replace(plan, items=others), planner)

    def _mapped(self, item: ReadItem, record: TensorRecord) -> Tensor:
        """The part of a tensor that an item is, mapped from its file: only what is used of it is read."""
        place = self.storage_data[item.storage_index]
        if math.prod(record.shape) == 0:
            return torch.empty(record.shape, dtype=record.dtype)
        if place.relative_path not in self._pages:
            with open_regular(self._source / place.relative_path) as file:
                # A private mapping; torch warns of memory that must not be written.
                self._pages[place.relative_path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        whole = torch.frombuffer(
            self._pages[place.relative_path],
            dtype=record.dtype,
            count=math.prod(record.shape),
            offset=place.offset + record.begin,
        ).view(record.shape)
        for dimension, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            whole = whole.narrow(dimension, start, size)
        return whole

    def _record_of(self, item: ReadItem) -> TensorRecord | None:
        """The place of the tensor in the record of an item."""
        place = self.storage_data[item.storage_index]
        key = place.relative_path, place.offset
        if key not in self._found:
            with open_regular(self._source / place.relative_path) as file:
                self._found[key] = record_of_tensor(_record(file, place), place.length)
        return self._found[key]

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        return _record(file, sinfo)


def _record(file: Any, place: Any) -> io.BufferedReader:
    if place.offset + place.length > os.fstat(file.fileno()).st_size:
        raise EOFError("the file is truncated")
    # A larger buffer would read much of the tensor together with its header.
    return io.BufferedReader(_Record(file, place.offset, place.length), 512)


class _PlainLoadPlanner(DefaultLoadPlanner):
    """Raises for values in the folder that are more than plain data."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        # torch would unpickle it without restrictions, so it gets what was read with them.
        plain = io.BytesIO()
        torch.save(pickled.read_open(value, read_item.dest_index.fqn), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def read_into(state: dict[str, Any], source: Path, *, alone: bool = False, guard: LoadGuard | None = None) -> None:
    """Read into the tensors of a state dict, sharded in any way; called on every process.

    Each process reads about as many bytes as its tensors have.

    Args:
        state: a state dict with tensors of the saved names and shapes.
        source: the folder of shards.
        alone: only this process reads.
        guard: the guard of the load; its `writes` is set before the first tensor is written.

    Raises:
        CheckpointError: the shards are incomplete or damaged, belong to other objects, or contain more than plain data.
    """
    _demand_regular(source)
    reader = _PlainReader(source, guard)
    try:
        with warnings.catch_warnings():
            # Only this process reads, intentionally.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(state, storage_reader=reader, planner=_PlainLoadPlanner(), no_dist=alone)
    except AccelError:
        raise
    except (Exception, CheckpointException) as error:  # a damaged file can make its reader raise any error
        failed = f"Cannot load {source.name} of {source.parent}."
        for met, _ in getattr(error, "failures", {}).values():
            if isinstance(met, AccelError):
                raise CheckpointError(failed, f"{met.failure} {met.obstacle}", met.remedy) from error
        raise CheckpointError(
            failed,
            f"The folder is damaged or belongs to other objects: {(str(error).strip().splitlines() or [''])[-1]}",
            "Load an older checkpoint, or create the same objects as when it was saved.",
        ) from error


def check_objects(source: Path) -> None:
    """Raise for shards that contain more than plain data, for an engine that reads them itself.

    Args:
        source: the folder of shards.

    Raises:
        CheckpointError: the metadata or a value is damaged or more than plain data, or its file is missing.
    """
    _demand_regular(source)
    metadata = read_metadata(source / ".metadata")
    values = {name for name, kind in metadata.state_dict_metadata.items() if isinstance(kind, BytesStorageMetadata)}
    for index, place in (metadata.storage_data or {}).items():
        if index.fqn in values:
            pickled.read_open(_value(source, index.fqn, place), index.fqn)


def _value(source: Path, name: str, place: Any) -> io.BytesIO:
    """The bytes of one value in its file."""
    asked = f"Cannot read {name!r} from {place.relative_path} of {source}."
    try:
        with open(source / place.relative_path, "rb") as shard:
            if place.offset + place.length > os.fstat(shard.fileno()).st_size:
                raise EOFError("it is truncated")
            shard.seek(place.offset)
            return io.BytesIO(shard.read(place.length))
    except (OSError, EOFError) as error:
        remedy = "The folder is incomplete: load an older checkpoint."
        raise CheckpointError(asked, f"The file cannot be read: {error}", remedy) from error


def names_in(source: Path) -> list[str]:
    """The names of all items in a folder of shards.

    Raises:
        CheckpointError: see `read_into`.
    """
    return list(read_metadata(source / ".metadata").state_dict_metadata)


def read_whole(source: Path) -> dict[str, Any]:
    """The full content of a folder of shards, assembled on this process and nested as it was saved.

    Raises:
        CheckpointError: see `read_into`.
    """
    _demand_regular(source)
    described = read_metadata(source / ".metadata")
    _demand_room(source, described)
    flat = {name: _place_for(one) for name, one in described.state_dict_metadata.items()}
    read_into(flat, source, alone=True)
    paths = described.planner_data or {}
    whole: dict[Any, Any] = {}
    for name, value in flat.items():
        _put(whole, paths.get(name, (name,)), value)
    found: dict[str, Any] = _with_lists(whole)
    return found


def _place_for(described: Any) -> Tensor | None:
    if not isinstance(described, TensorStorageMetadata):
        return None
    return torch.empty(described.size, dtype=described.properties.dtype)


def _demand_regular(source: Path) -> None:
    """Raise for a folder with pipes or devices, which would block torch's reader."""
    for path in walk(source):
        if path.exists() and not path.is_file():
            raise CheckpointError(
                f"Cannot load the shards in {source}.",
                f"{path.name} is not a regular file.",
                "Load an older checkpoint.",
            )


def _demand_room(source: Path, described: Metadata) -> None:
    """Raise for tensors that are larger than the files, because their memory is allocated before reading."""
    tensors = [one for one in described.state_dict_metadata.values() if isinstance(one, TensorStorageMetadata)]
    wanted = sum(math.prod(one.size) * one.properties.dtype.itemsize for one in tensors)
    there = sum(path.stat().st_size for path in source.iterdir() if path.is_file())
    if wanted > there:
        raise CheckpointError(
            f"Cannot merge the shards in {source}.",
            f"Their metadata describes tensors of {wanted} bytes, and the files have {there}.",
            "The folder is incomplete or damaged: load an older checkpoint.",
        )


def _put(whole: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    *above, last = path
    for step in above:
        whole = whole.setdefault(step, {})
    whole[last] = value


def _with_lists(item: Any) -> Any:
    """Convert mappings in which all keys are numbers to lists."""
    if not isinstance(item, dict):
        return item
    inner = {key: _with_lists(value) for key, value in item.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner
