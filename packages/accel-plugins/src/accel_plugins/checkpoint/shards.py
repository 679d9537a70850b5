"""Folders of shards, written and read by `torch.distributed.checkpoint` with its planners.

Each process writes its shards, and of what several processes hold, one of them writes it. A folder can be read on
another number of processes and with other placements, or completely by one process.

torch reads `.metadata`, and values that are not tensors, with pickle. Here `.metadata` may use only the classes that
describe tensors (`checkpoint.shard_metadata`), and values are read as plain data.
"""

from __future__ import annotations

import dataclasses
import io
import math
import mmap
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from accel_bigmodel.loading import LoadGuard
from accel_bigmodel.tensors import memory_of
from accel_bigmodel.weight_files.reading import TensorRecord, forget_pages, record_of_tensor
from accel_ops.dtensors import local_chunks
from accel_plugins.checkpoint import pickled
from accel_plugins.checkpoint.files import FlushedWhileWritten, walk
from accel_plugins.checkpoint.shard_metadata import read_metadata
from accel_state.errors import AccelError, CheckpointError
from accel_state.untrusted import open_regular

__all__ = (
    "PortableWriter",
    "SavePlans",
    "check_objects",
    "names_in",
    "read_into",
    "read_whole",
    "write_shards",
)

_BUFFER: Final = 1 << 18

# ---------------------------------------------------------------------- writing


class PortableWriter(FileSystemWriter):
    """Stores the paths of shards as strings, because another system or Python may not be able to read a pickled path.

    Files are not flushed here: `checkpoint.commit` flushes them while the next ones are being written.

    Args:
        target: the folder of shards.
    """

    def __init__(self, target: Path) -> None:
        super().__init__(target, sync_files=False)
        self.fs = _EarlyFlush()

    def storage_meta(self) -> StorageMeta | None:
        """The content of `.metadata` besides the tensors."""
        meta = super().storage_meta()
        if meta is not None:
            meta.checkpoint_id = str(meta.checkpoint_id)
        return meta


class _EarlyFlush(FileSystem):
    """Starts the writeback of a file while it is being written."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """An open file."""
        with FlushedWhileWritten(path, mode) as raw, io.BufferedWriter(raw, _BUFFER) as stream:
            yield stream


class SavePlans:
    """The plans of the last save of one object, with which the next save of the same layout needs no planning.

    torch keeps plans in the class `SavePlanner`, by a key that is the same for all planners of a class.
    """

    _numbers = count()

    def __init__(self) -> None:
        self.key: Final = f"accel-{next(self._numbers)}"
        self._dtypes: dict[str, torch.dtype] = {}

    def follow(self, state: Mapping[str, Any]) -> None:
        """Discard the plans if tensors have other dtypes than in the last save, which torch does not compare."""
        dtypes = {name: value.dtype for name, value in state.items() if isinstance(value, Tensor)}
        if dtypes != self._dtypes:
            self.forget()
            self._dtypes = dtypes

    def forget(self) -> None:
        """Discard the plans."""
        for name, cache in vars(SavePlanner).items():
            if name.startswith("_cached_"):
                cache.pop(self.key, None)


class _SavePlanner(DefaultSavePlanner):
    """torch's planner with a cache for each object, for shards that consist of several chunks.

    Args:
        plans: the plans of the last save of the object.
    """

    def __init__(self, plans: SavePlans) -> None:
        super().__init__(enable_plan_caching=True)
        self._plans, self._cached_plans_key = plans, plans.key

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Plan for a state."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._plans.follow(self.state_dict)
        self.state_dict = _in_chunks(self.state_dict)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The items that each process writes, and the metadata; on the first process."""
        if self._plans.key not in SavePlanner._cached_all_plans and not all(plan.usable for plan in all_plans):
            # torch would take the empty plans for plans of nothing.
            raise ValueError("some processes sent an empty plan, but this process has no plans of an earlier save")
        return super().create_global_plan(all_plans)


def _in_chunks(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with several chunks for each shard that is not contiguous in the full tensor; torch assumes one."""
    return {name: _with_chunks(value) if isinstance(value, DTensor) else value for name, value in state.items()}


def _with_chunks(tensor: DTensor) -> DTensor:
    if not any(hasattr(placement, "split_factor") for placement in tensor.placements):
        return tensor
    held = local_chunks(tensor)
    local: Any = LocalShardsWrapper([chunk.local for chunk in held], [chunk.offsets for chunk in held])
    constructed: Any = DTensor
    described: DTensor = constructed(local, tensor._spec, requires_grad=False)
    return described


def write_shards(state: dict[str, Any], target: Path, plans: SavePlans, group: Any = None) -> None:
    """Write the shards of a state; called on every process.

    Args:
        state: nested containers with tensors that are sharded or equal on all processes.
        target: the folder of shards.
        plans: the plans of the last save of this state.
        group: a separate process group for planning, with a backend that supports CPU tensors.

    Raises:
        CheckpointError: this or another process cannot write.
    """
    alone = not torch.distributed.is_initialized()
    try:
        with _without_remarks():
            save(
                state,
                storage_writer=PortableWriter(target),
                planner=_SavePlanner(plans),
                process_group=group,
                no_dist=alone,
            )
    except BaseException as error:
        # Other processes may not have the same plans.
        plans.forget()
        if not isinstance(error, (Exception, CheckpointException)):
            raise
        raise CheckpointError(
            f"Cannot save the shards in {target}.",
            _first_reason(error),
            "Check the free space and the permissions of the folder.",
        ) from error


@contextmanager
def _without_remarks() -> Iterator[None]:
    """A block without torch's warning that only this process reads or writes, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _first_reason(error: BaseException) -> str:
    """The first line of an error; of those of several processes, the first one's."""
    failures: Mapping[int, Any] = getattr(error, "failures", {})
    for rank, (cause, _) in failures.items():
        return f"Process {rank} failed: {type(cause).__name__}: {cause}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---------------------------------------------------------------------- reading


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
            forget_pages(part)
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


class _LoadPlanner(DefaultLoadPlanner):
    """torch's planner for shards that consist of several chunks, and for values that are only plain data."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Plan for a state."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = _in_chunks(self.state_dict)

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
        with _without_remarks():
            load(state, storage_reader=reader, planner=_LoadPlanner(), no_dist=alone)
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
