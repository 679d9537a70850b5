"""Reads the tensors of a file into existing memory.

Each tensor is in memory once, and writing to memory in use takes a quarter of the time of fresh memory. A mapping of
the file gives the positions of its tensors; the bytes are read, because a copy from the mapping takes twice as long and
a file that another process truncates would end the process.
"""

from __future__ import annotations

import copy
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from accel_bigmodel.failed_load import LoadGuard
from accel_bigmodel.weight_files.range_reader import RangeReader
from accel_bigmodel.weight_files.reading import FileWeight, WeightSource, open_weights
from accel_plugins.checkpoint import pickled
from accel_state.untrusted import open_regular

__all__ = ("MappedState", "read_weights")

_LOCAL_HEADER: Final = 30
_FORMATS: Final = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def read_weights(path: Path, own: Mapping[str, Any], guard: LoadGuard | None = None) -> dict[str, Any]:
    """The weights of a safetensors file; where names and shapes agree, they are read into the tensors of `own`.

    A tensor of another dtype or on another device is converted and moved on the way.

    Args:
        path: the file.
        own: tensors by name.
        guard: its `writes` is set while tensors change.

    Raises:
        CheckpointError: the file is missing or damaged; tensors are filled in part when it cannot be read to its end.
    """
    found = open_weights([WeightSource(path)])
    reader, weights, filled = RangeReader(), dict[str, Any](), set[int]()
    fills = _agree(found, own)
    for name, weight in found.items():
        target: Any = own.get(name)
        # Of a tensor under several names, `load_state_dict` copies the later ones.
        if fills and _is_dense(target) and target.data_ptr() not in filled:
            filled.add(target.data_ptr())
            weight.read_into(reader, target)
            weights[name] = target
        else:
            weights[name] = weight.mapped()
    guard = guard or LoadGuard()
    guard.writes = bool(filled)
    reader.run()
    guard.writes = False
    return weights


def _agree(found: Mapping[str, FileWeight], own: Mapping[str, Any]) -> bool:
    """Whether the names and shapes agree; where they do not, `load_state_dict` says so before a tensor has changed."""
    if any(name not in own or weight.shape != tuple(own[name].shape) for name, weight in found.items()):
        return False
    given = {own[name].data_ptr() for name in found}
    return all(name in found or value.data_ptr() in given for name, value in own.items() if isinstance(value, Tensor))


def _is_dense(own: Any) -> bool:
    """Whether a tensor has memory of its own without gaps, which may be written to."""
    return (
        type(own) in (Tensor, Parameter)
        and own.layout == torch.strided
        and not (own.is_meta or own.is_inference() or own.is_neg() or own.is_conj())
        and any(own.is_contiguous(memory_format=form) for form in _FORMATS[: 1 + max(0, own.dim() - 3)])
    )


def _bytes_of(storage: torch.UntypedStorage, offset: int, size: int) -> Tensor:
    """Memory of a storage on the CPU as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (size,), (1,))


class MappedState:
    """What `torch.save` wrote, with tensors that are mapped until `read` is called.

    Args:
        path: the file.

    Attributes:
        state: what it holds; containers in it may be rearranged before `read`.

    Raises:
        CheckpointError: the file is missing, damaged, or holds more than plain data.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.state: Any = None
        self._begin: int | None = None
        if records := _records(path):
            self.state = pickled.read(path, mmap=True)
            self._begin = _mapped_at(list(_tensors(self.state)), records)
        if self._begin is None:
            self.state = pickled.read(path)

    def read(self, state: Any, own: Any) -> Any:
        """The state with tensors that are read.

        Args:
            state: `self.state`, or containers that hold what it held.
            own: containers of the same form; a tensor in them receives the one at the same position in `state` if it
                has memory of the same form, and replaces it in the result.

        Raises:
            CheckpointError: the file is shorter than it says.
        """
        if self._begin is None:
            return state
        reading = _Reading(self._path, self._begin, list(_tensors(state)))
        read = reading.tree(state, own)
        reading.run()
        return read


class _Reading:
    """Replaces mapped tensors by such as have memory of their own."""

    def __init__(self, path: Path, begin: int, tensors: list[Tensor]) -> None:
        self._path, self._begin = path, begin
        self._reader = RangeReader()
        self._filled: dict[int, Tensor] = {}
        self._users = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
        self._fresh: dict[int, torch.UntypedStorage] = {}

    def run(self) -> None:
        """Fill everything."""
        self._reader.run()
        for tensor in self._filled.values():
            torch.autograd.graph.increment_version(tensor)

    def tree(self, item: Any, own: Any) -> Any:
        """The same containers, with other tensors."""
        if isinstance(item, Tensor):
            return self._tensor(item, own)
        if isinstance(item, dict):
            known = own if isinstance(own, Mapping) else {}
            for key, value in item.items():
                item[key] = self.tree(value, known.get(key))
            return item
        if type(item) in (list, tuple):
            others = own if isinstance(own, (list, tuple)) and len(own) == len(item) else [None] * len(item)
            return type(item)(map(self.tree, item, others))
        return item

    def _tensor(self, mapped: Tensor, own: Any) -> Tensor:
        if not _is_plain(mapped):
            return copy.deepcopy(mapped)
        storage = mapped.untyped_storage()
        address = storage.data_ptr()
        alone = self._users[address] == 1 and storage.nbytes() == mapped.nbytes
        if alone and self._takes(own, mapped):
            self._filled[own.data_ptr()] = own
            self._fill(own.untyped_storage(), own.storage_offset() * own.itemsize, own.nbytes, address)
            return own  # type: ignore[no-any-return]
        if address not in self._fresh:
            self._fresh[address] = fresh = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            self._fill(fresh, 0, fresh.nbytes(), address)
        read = torch.empty(0, dtype=mapped.dtype)
        read.set_(self._fresh[address], mapped.storage_offset(), mapped.shape, mapped.stride())
        return read

    def _takes(self, own: Any, wanted: Tensor) -> bool:
        """Whether the bytes of `wanted` are exactly those of `own`, which no other tensor fills."""
        return (
            _is_dense(own)
            and own.device.type == "cpu"
            and (own.dtype, own.shape, own.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
            and own.data_ptr() not in self._filled
        )

    def _fill(self, storage: torch.UntypedStorage, offset: int, size: int, address: int) -> None:
        """Read the bytes that are mapped at an address into a part of a storage."""
        self._reader.add(_bytes_of(storage, offset, size), self._path, address - self._begin)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_quantized and tensor.nbytes > 0


def _tensors(item: Any) -> Iterator[Tensor]:
    """All tensors in plain memory."""
    if isinstance(item, Tensor):
        if _is_plain(item):
            yield item
    elif isinstance(item, (dict, list, tuple)):
        for value in item.values() if isinstance(item, dict) else item:
            yield from _tensors(value)


def _mapped_at(tensors: list[Tensor], records: Mapping[int, int]) -> int | None:
    """The address at which a file is mapped, or None when some tensor is outside of its records.

    torch tells where its tensors are and not where the file begins; the first record has the first of the addresses.
    """
    places = {storage.data_ptr(): storage.nbytes() for storage in (one.untyped_storage() for one in tensors)}
    if not places or not records:
        return None
    begin = min(places) - min(records)
    agree = all(records.get(address - begin) == size for address, size in places.items())
    return begin if agree else None


def _records(path: Path) -> dict[int, int]:
    """Positions of the bytes of tensors in a file of `torch.save`, with sizes; empty if they cannot be mapped.

    The format: https://pytorch.org/docs/stable/notes/serialization.html. The header of each member in the file itself
    has fields of other lengths than that in the directory at its end.
    """
    try:
        with open_regular(path) as opened, BufferedReader(opened) as file, zipfile.ZipFile(file) as archive:
            members = [one for one in archive.infolist() if "/data/" in one.filename and one.file_size]
            if any(one.compress_type != zipfile.ZIP_STORED for one in members):
                return {}
            found = {}
            for one in members:
                file.seek(one.header_offset)
                name, extra = struct.unpack_from("<HH", file.read(_LOCAL_HEADER), 26)
                found[one.header_offset + _LOCAL_HEADER + name + extra] = one.file_size
            return found
    except Exception:  # a damaged archive can make its reader raise anything; who reads it next says what is wrong
        return {}
