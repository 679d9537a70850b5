"""Folders of shards of `torch.distributed.checkpoint`: read by all processes together, or completely by one.

torch reads their `.metadata`, and values that are not tensors, with pickle. Both are first checked by a reader that
accepts only plain data. Tensors and their positions may be described only by the classes listed here, each constructed
as in torch's own pickles: without arguments, with a state of plain fields.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from accel_bigmodel.failed_load import LoadGuard
from accel_bigmodel.tied import memory_of
from accel_bigmodel.weight_files.range_reader import RangeReader
from accel_bigmodel.weight_files.torch_files import TorchTensor, check_torch_file, plain_rules
from accel_ops.pickle_check import Budget, Global, Made, Rule, Rules, check_pickle, demand, is_made
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.files import walk
from accel_state.errors import AccelError, CheckpointError
from accel_state.untrusted import open_regular

__all__ = (
    "check_objects",
    "metadata_rules",
    "names_in",
    "read_into",
    "read_metadata",
    "read_whole",
)

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FILES: Final = "torch.distributed.checkpoint.filesystem"
_PLANS: Final = "torch.distributed.checkpoint.planner"

Field = Callable[[Any], object]


def _is(value: Any, *kinds: str) -> bool:
    """Whether a value is an object of one of these kinds with its fields set."""
    return is_made(value, *kinds) and (value.state is not None or not _required(value.kind))


def _kind(*kinds: str) -> Field:
    return lambda value: _is(value, *kinds)


@dataclasses.dataclass(frozen=True)
class _Optional:
    """The allowed values of an optional field."""

    inner: Field

    def __call__(self, value: Any) -> bool:
        return value is None or bool(self.inner(value))


def _text(value: Any) -> bool:
    return type(value) is str


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _strides(value: Any) -> bool:
    return value is None or (is_made(value, "tuple") and all(map(_count, value.parts)))


def _list_of(kind: str) -> Field:
    return lambda value: is_made(value, "list") and all(_is(part, kind) for part in value.parts)


def _mapping(keys: Field, *kinds: str) -> Field:
    def admits(value: Any) -> bool:
        return (
            is_made(value, "dict")
            and all(map(keys, value.parts[::2]))
            and all(_is(part, *kinds) for part in value.parts[1::2])
        )

    return admits


def _file_name(value: Any) -> bool:
    """A file name inside the folder; others could read files elsewhere."""
    inside = type(value) is str and value not in ("", ".", "..") and not set(value) & set("/\\:\0")
    demand(inside, f"it names the file {value!r}, which leads out of the folder")
    return True


def _place(value: Any) -> bool:
    return _text(value) or is_made(value, "path")


_FIELDS: Final[Mapping[tuple[str, str], Mapping[str, Field]]] = {
    (_METADATA, "Metadata"): {
        "state_dict_metadata": _mapping(
            _text, f"{_METADATA}.TensorStorageMetadata", f"{_METADATA}.BytesStorageMetadata"
        ),
        "storage_data": _Optional(_mapping(_kind(f"{_METADATA}.MetadataIndex"), f"{_FILES}._StorageInfo")),
        "storage_meta": _Optional(_kind(f"{_METADATA}.StorageMeta")),
        "version": _Optional(_text),
    },
    (_METADATA, "TensorStorageMetadata"): {
        "properties": _kind(f"{_METADATA}.TensorProperties"),
        "size": _kind("torch.Size"),
        "chunks": _list_of(f"{_METADATA}.ChunkStorageMetadata"),
    },
    (_METADATA, "BytesStorageMetadata"): {},
    (_METADATA, "ChunkStorageMetadata"): {"offsets": _kind("torch.Size"), "sizes": _kind("torch.Size")},
    (_METADATA, "MetadataIndex"): {
        "fqn": _text,
        "offset": _Optional(_kind("torch.Size")),
        "index": _Optional(_count),
    },
    (_METADATA, "StorageMeta"): {
        "checkpoint_id": _Optional(_place),
        "save_id": _Optional(_text),
        "load_id": _Optional(_text),
    },
    (_FILES, "_StorageInfo"): {
        "relative_path": _file_name,
        "offset": _count,
        "length": _count,
        "transform_descriptors": _Optional(lambda value: False),  # compressed, by an extension
    },
    (_FILES, "_StoragePrefix"): {"prefix": _file_name},
    (_PLANS, "SavePlan"): {"items": _list_of(f"{_PLANS}.WriteItem")},
    (_PLANS, "WriteItem"): {
        "index": _kind(f"{_METADATA}.MetadataIndex"),
        "type": _kind(f"{_PLANS}.WriteItemType"),
        "bytes_io_data": _Optional(_kind(f"{_PLANS}.BytesIOWriteData")),
        "tensor_data": _Optional(_kind(f"{_PLANS}.TensorWriteData")),
    },
    (_PLANS, "BytesIOWriteData"): {"nbytes": _count},
    (_PLANS, "TensorWriteData"): {
        "chunk": _kind(f"{_METADATA}.ChunkStorageMetadata"),
        "properties": _kind(f"{_METADATA}.TensorProperties"),
        "size": _kind("torch.Size"),
    },
}
"""The classes and the types of their fields; fields that are not listed, as of a later torch, must be plain data."""

_ENUMS: Final = {
    (_METADATA, "_MEM_FORMAT_ENCODING"): int,
    (_PLANS, "WriteItemType"): int,
    (_FILES, "SerializationFormat"): str,
}
_PROPERTIES: Final = (_METADATA, "TensorProperties")
_DATA: Final = ("collections.OrderedDict", "builtins.set", "torch.Size", "torch.serialization._get_layout")


@cache
def _required(kind: str) -> frozenset[str]:
    """The required fields of each kind of object."""
    for pair, fields in _FIELDS.items():
        if ".".join(pair) == kind:
            return frozenset(name for name, field in fields.items() if not isinstance(field, _Optional))
    return frozenset({"dtype"} if kind == ".".join(_PROPERTIES) else ())


def _made(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(not arguments, f"{name} is constructed with arguments")
    return Made(str(name), [])


def _state(fields: Mapping[str, Field]) -> Callable[[Made, Any, Budget], None]:
    def build(made: Made, state: Any, budget: Budget) -> None:
        demand(is_made(state, "dict"), f"{made.kind} has a state that is not a dict of fields")
        for name, value in zip(state.parts[::2], state.parts[1::2], strict=True):
            demand(
                _text(name) and name.isidentifier() and not name.startswith("__"), f"{made.kind} has unexpected fields"
            )
            demand(name not in fields or fields[name](value), f"the {name} of {made.kind} is of an unexpected kind")
        missing = _required(made.kind) - set(state.parts[::2])
        demand(not missing, f"{made.kind} has no {', '.join(sorted(missing))}")

    return build


def _properties(made: Made, state: Any, budget: Budget) -> None:
    demand(is_made(state, "tuple") and len(state.parts) in (5, 6), f"{made.kind} has a non-standard state")
    dtype, layout, gradient, memory, pinned, *strides = state.parts
    # torch 2.15 added the strides and reads files of older versions, which cannot read its six properties.
    demand(all(map(_strides, strides)), f"{made.kind} has a non-standard state")
    demand(
        len(state.parts) <= len(dataclasses.fields(TensorProperties)),
        "a newer torch wrote it: install torch 2.15 or newer",
    )
    demand(isinstance(dtype, Global) and is_made(layout, "torch.layout"), "a tensor has no dtype or layout")
    demand(is_made(memory, f"{_METADATA}._MEM_FORMAT_ENCODING"), "a tensor has no memory format")
    demand(type(gradient) is bool and type(pinned) is bool, f"{made.kind} has a non-standard state")


def _member(kind: type) -> Callable[[Global, list[Any], Budget], Made]:
    def call(name: Global, arguments: list[Any], budget: Budget) -> Made:
        demand(len(arguments) == 1 and type(arguments[0]) is kind, f"{name} is not constructed from its value")
        return Made(str(name), [])

    return call


def _path(name: Global, arguments: list[Any], budget: Budget) -> Made:
    demand(all(map(_text, arguments)), f"{name} is not constructed from strings")
    return Made("path", [])


@cache
def metadata_rules() -> Rules:
    """The allowed constructors of metadata, by module and name."""
    taken = {pair: rule for pair, rule in plain_rules().items() if ".".join(pair) in _DATA or rule.constant}
    own = {pair: Rule(new=_made, build=_state(fields)) for pair, fields in _FIELDS.items()}
    own[_METADATA, "MetadataIndex"] = Rule(new=_made, build=_state(_FIELDS[_METADATA, "MetadataIndex"]), key=True)
    own[_PROPERTIES] = Rule(new=_made, build=_properties)
    enums = {pair: Rule(call=_member(kind), key=True) for pair, kind in _ENUMS.items()}
    paths = {
        (module, name): Rule(call=_path)
        for module in ("pathlib", "pathlib._local")  # the second is that of Python 3.13
        for name in ("PosixPath", "WindowsPath")
    }
    return {**taken, **own, **enums, **paths}


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
        described, _ = check_pickle(content, metadata_rules(), Budget(len(content)))
        demand(_is(described, f"{_METADATA}.Metadata"), "it is not a description of tensors")
        found: Metadata = pickle.loads(content)  # the checked bytes, even if the file changes
        return found
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
    All records are checked before the first tensor is written.

    Args:
        source: the folder of shards.
        guard: the guard of the load; its `writes` is set before the first tensor is written.
    """

    def __init__(self, source: Path, guard: LoadGuard | None = None) -> None:
        super().__init__(source)
        self._described = read_metadata(source / ".metadata")
        self._source = source
        self._guard = guard or LoadGuard()
        self._found: dict[tuple[str, int], TorchTensor | None] = {}

    # Ignoring torch's argument `rank` prevents the use of metadata files of single ranks.
    def read_metadata(self) -> Metadata:
        """The metadata of the folder."""
        self._described.storage_meta = self._described.storage_meta or StorageMeta()
        self._described.storage_meta.load_id = self.load_id
        return self._described

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Read the planned items: ranges of plain tensors by several threads, everything else as torch does."""
        ranges, others = RangeReader(), list[ReadItem]()
        filled: dict[tuple[Any, ...], tuple[ReadItem, Tensor]] = {}
        for item in plan.items:
            target = planner.resolve_tensor(item).detach() if item.type is LoadItemType.TENSOR else None
            found = self._record_of(item)
            if target is None or found is None or target.layout != torch.strided or type(target) is not Tensor:
                others.append(item)
                continue
            ends = [start + size for start, size in zip(item.storage_offsets, item.lengths, strict=True)]
            inside = len(ends) == len(found.shape) and all(map(int.__le__, ends, found.shape))
            demand(inside and target.shape == item.lengths, f"{item.storage_index.fqn!r} has another shape")
            memory = (*memory_of(target), item.dest_offsets)
            # Tied weights have several names and the same memory.
            if memory not in filled:
                place = self.storage_data[item.storage_index]
                path, begin = self._source / place.relative_path, place.offset + found.begin
                ranges.add(target, path, begin, found.dtype, found.shape, item.storage_offsets)
                filled[memory] = item, target
        self._guard.writes = True
        ranges.run()
        for item, target in filled.values():
            planner.commit_tensor(item, target)
        return super().read_data(dataclasses.replace(plan, items=others), planner)

    def _record_of(self, item: ReadItem) -> TorchTensor | None:
        """The tensor in the record of an item, after a check of the full record."""
        place = self.storage_data[item.storage_index]
        key = place.relative_path, place.offset
        if key not in self._found:
            with open_regular(self._source / place.relative_path) as file:
                self._found[key] = check_torch_file(_record(file, place))
        return self._found[key]

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        record = _record(file, sinfo)
        check_torch_file(record)
        record.seek(0)
        return record


def _record(file: Any, place: Any) -> io.BufferedReader:
    demand(place.offset + place.length <= os.fstat(file.fileno()).st_size, "the file is truncated")
    # A larger buffer would read much of the tensor together with its header.
    return io.BufferedReader(_Record(file, place.offset, place.length), 512)


class _PlainLoadPlanner(DefaultLoadPlanner):
    """Raises for values in the folder that are more than plain data."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        pickled.read_open(value, read_item.dest_index.fqn)
        value.seek(0)
        super().load_bytes(read_item, value)


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
