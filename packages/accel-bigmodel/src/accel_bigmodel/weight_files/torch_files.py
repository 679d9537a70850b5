"""Looks through what `torch.save` wrote before `torch.load` reads it.

`torch.load(weights_only=True)` runs no code of a file. It still allocates what a few bytes ask for, such as
`bytearray(10**10)` or `torch.Tensor(10**10)`, and gives tensors shapes that their memory does not have. Here each name
has one way to be made, each tensor lies inside of its storage, and each storage inside of the file.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from io import BufferedReader
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Any, Final

import torch

from accel_bigmodel.weight_files.plain_rules import STORAGES, torch_rules
from accel_ops.pickle_check import Budget, Global, Made, PickleRefused, check, demand, is_made
from accel_state.untrusted import open_regular

__all__ = ("check_torch_file",)

_MAGIC: Final = 0x1950A86A20F9469CFC6C
"""What files of torch before 1.6 begin with: https://pytorch.org/docs/stable/notes/serialization.html."""


class _Storages:
    """Describes what the persistent ids of a file refer to."""

    def __init__(self, size_of: Callable[[str], int], fields: int) -> None:
        self._size_of = size_of
        self._fields = fields
        self.known: dict[str, tuple[Any, ...]] = {}

    def __call__(self, name: Global, parts: list[Any], budget: Budget) -> Made:
        demand(len(parts) == self._fields and parts[0] == "storage", "it refers to something else than a storage")
        kind, key, location, count, *view = parts[1:]
        demand(isinstance(kind, Global) and (kind.module, kind.name) in STORAGES, f"{kind} is not a storage")
        demand(type(key) is str and type(location) is str and type(count) is int, "a storage is damaged")
        itemsize = STORAGES[kind.module, kind.name]
        whole = (str(kind), location, count)
        if key not in self.known:
            self.known[key] = whole
            demand(0 <= count * itemsize <= self._size_of(key), f"storage {key} is larger than what the file holds")
            budget.spend(count * itemsize)
        demand(self.known[key] == whole, f"storage {key} is of two kinds")
        if view and view[0] is not None:
            demand(is_made(view[0], "tuple") and len(view[0].parts) == 3, "a part of a storage is damaged")
            _, offset, part = view[0].parts
            demand(
                type(offset) is int and type(part) is int and 0 <= offset <= offset + part <= count,
                "a part lies outside",
            )
            count = part
        return Made("storage", [], (itemsize, count * itemsize))


def check_torch_file(file: Path | IO[bytes]) -> None:
    """Refuse a file of `torch.save` that holds more than plain data, or that takes more memory than it has bytes for.

    Args:
        file: its path, or an open file that can be sought in; it is read from its first byte.

    Raises:
        PickleRefused: it does, or it is damaged.
        OSError: it cannot be read.
    """
    if isinstance(file, Path):
        with BufferedReader(open_regular(file)) as opened:
            _check_opened(opened, str(file))
    else:
        _check_opened(file, file)


def _check_opened(file: IO[bytes], source: Any) -> None:
    size = file.seek(0, 2)
    file.seek(0)
    begin = file.read(4)
    file.seek(0)
    if begin == b"PK\x03\x04":
        _check_archive(file, source, size)
    else:
        _check_sequence(_mapped(file, size), size)


def _mapped(file: IO[bytes], size: int) -> bytes | mmap:
    try:
        return mmap(file.fileno(), 0, access=ACCESS_READ)
    except (OSError, ValueError, AttributeError):
        return file.read(size)


def _check_archive(file: IO[bytes], source: Any, size: int) -> None:
    """The format since torch 1.6: a zip archive with one pickle, and a member for each storage."""
    budget = Budget(size)
    try:
        with zipfile.ZipFile(file) as archive:
            lengths = {member.filename.partition("/")[2]: member.file_size for member in archive.infolist()}
        # Compressed members may be larger than the file; torch reads some as soon as it opens the archive.
        demand(sum(lengths.values()) <= budget.left, "its members are larger than what it can hold")
        file.seek(0)
        records: Any = torch._C.PyTorchFileReader(source)
        length: Callable[[str], int] = getattr(records, "get_record_size", lengths.__getitem__)  # torch 2.9 lacks it
        demand(length("data.pkl") <= budget.left, "its pickle is larger than what it can hold")
        pickled: bytes = records.get_record("data.pkl")
    except (RuntimeError, KeyError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile) as error:
        raise PickleRefused(f"it is damaged: {(str(error).splitlines() or [''])[0]}") from error

    def size_of(key: str) -> int:
        name = f"data/{key}"
        demand(records.has_record(name) and name in lengths, f"storage {key} is not in the file")
        return min(length(name), lengths[name])

    check(pickled, torch_rules(), budget, storage=_Storages(size_of, fields=5))


def _check_sequence(data: bytes | mmap, size: int) -> None:
    """The format before torch 1.6: five pickles, then the storages one after another."""
    budget = Budget(size)
    left = size

    def size_of(key: str) -> int:
        return left

    storages = _Storages(size_of, fields=6)
    magic, at = check(data, {}, budget)
    demand(magic == _MAGIC, "it was not written by torch.save")
    for number, allowed in enumerate(({}, {}, torch_rules(), {})):
        _, at = check(data, allowed, budget, storage=storages if number == 2 else None, start=at)
    total = sum(STORAGES[_split(kind)] * count for kind, _, count in storages.known.values())
    demand(total <= size - at, "its storages are larger than the file")


def _split(kind: str) -> tuple[str, str]:
    module, _, name = kind.rpartition(".")
    return module, name
