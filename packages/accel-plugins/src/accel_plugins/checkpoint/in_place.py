"""Reads the tensors of a file into existing memory.

Each tensor is in memory once, and writing to memory in use takes a quarter of the time of fresh memory. A mapping of
the file gives the positions of its tensors; the bytes are read, because a copy from the mapping takes twice as long and
a file that another process truncates would end the process.
"""

from __future__ import annotations

import copy
import ctypes
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from accel_bigmodel.weight_files.reading import WeightFile
from accel_plugins.checkpoint import pickled
from accel_state.errors import CheckpointError
from accel_state.untrusted import open_regular

__all__ = ("MappedState", "read_weights")

_PIECE: Final = 1 << 24
"""Bytes that one thread reads at a time."""

_THREADS: Final = 2
_LOCAL_HEADER: Final = 30
_FORMATS: Final = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


class _Filling:
    """Memory that is to be filled from one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pieces: list[tuple[int, int, int]] = []
        self._targets: dict[int, Any] = {}

    def takes(self, own: Any, wanted: Tensor) -> bool:
        """Whether the bytes of `wanted` are exactly those of `own`."""
        return (
            type(own) in (Tensor, Parameter)
            and own.device.type == "cpu"
            and (own.dtype, own.shape, own.layout) == (wanted.dtype, wanted.shape, wanted.layout)
            and own.stride() == wanted.stride()
            and any(own.is_contiguous(memory_format=form) for form in _FORMATS[: 1 + max(0, own.dim() - 3)])
            and not (own.is_inference() or own.is_neg() or own.is_conj())
            and own.data_ptr() not in self._targets
        )

    def add(self, target: Any, nbytes: int, offset: int) -> None:
        """Fill the memory of a tensor or storage with the bytes at a position of the file."""
        address = target.data_ptr()
        self._targets[address] = target
        for start in range(0, nbytes, _PIECE):
            self._pieces.append((address + start, min(_PIECE, nbytes - start), offset + start))

    def run(self) -> None:
        """Fill everything.

        Raises:
            CheckpointError: the file is shorter than it says, or cannot be read.
        """
        try:
            if sum(size for _, size, _ in self._pieces) <= _PIECE:
                self._read(self._pieces)
            else:
                with ThreadPoolExecutor(_THREADS, thread_name_prefix="accel-load") as threads:
                    list(threads.map(self._read, (self._pieces[first::_THREADS] for first in range(_THREADS))))
        except (OSError, EOFError) as error:
            raise CheckpointError(
                f"Cannot read {self._path.name} from {self._path.parent}.",
                f"{type(error).__name__}: {error}",
                "The file is damaged: load an older checkpoint.",
            ) from error
        for target in self._targets.values():
            if isinstance(target, Tensor):
                torch.autograd.graph.increment_version(target)

    def _read(self, pieces: list[tuple[int, int, int]]) -> None:
        with open_regular(self._path) as file:
            for address, size, offset in pieces:
                memory = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
                file.seek(offset)
                while memory:
                    count = file.readinto(memory)
                    if not count:
                        raise EOFError(f"it ends {len(memory)} bytes too early")
                    memory = memory[count:]


def read_weights(path: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a safetensors file; where `own` has memory of the same form under a name, it is read into that.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    file = WeightFile(path)
    filling = _Filling(path)
    weights: dict[str, Any] = {}
    for name, entry in file.header.entries.items():
        weight = file.get(name)
        if filling.takes(own.get(name), weight):
            weight = own[name]
            filling.add(weight, weight.nbytes, entry.begin)
        weights[name] = weight
    filling.run()
    return weights


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
        reading = _Reading(_Filling(self._path), self._begin, list(_tensors(state)))
        read = reading.tree(state, own)
        reading.filling.run()
        return read


class _Reading:
    """Replaces mapped tensors by such as have memory of their own."""

    def __init__(self, filling: _Filling, begin: int, tensors: list[Tensor]) -> None:
        self.filling, self._begin = filling, begin
        self._users = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
        self._fresh: dict[int, torch.UntypedStorage] = {}

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
        if alone and self.filling.takes(own, mapped):
            self.filling.add(own, own.nbytes, address - self._begin)
            return own  # type: ignore[no-any-return]
        if address not in self._fresh:
            self._fresh[address] = fresh = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            self.filling.add(fresh, fresh.nbytes(), address - self._begin)
        read = torch.empty(0, dtype=mapped.dtype)
        read.set_(self._fresh[address], mapped.storage_offset(), mapped.shape, mapped.stride())
        return read


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
