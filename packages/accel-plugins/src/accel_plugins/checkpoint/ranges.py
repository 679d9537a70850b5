"""The ranges of a file that have a hash of their own, and the tensors in them.

Ranges follow each other without a gap. Those of a safetensors file end where tensors end; large tensors, and other
files, are cut into pieces, so that threads and processes can share the work.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, Final

import xxhash

from accel_bigmodel.weight_files.metadata import Header, read_header
from accel_bigmodel.weight_files.names import is_safetensors
from accel_state.errors import CheckpointError
from accel_state.untrusted import open_regular

__all__ = ("hash_of", "place_of", "range_ends")

_LONGEST: Final = 1 << 24
_SHORTEST: Final = 1 << 16
"""Bytes below which neighbouring tensors share a range."""

_BUFFER: Final = 1 << 18
_POPULATE_READ: Final = 22
"""`MADV_POPULATE_READ` of Linux 5.14: maps pages at once, and says so where one cannot be read."""


def range_ends(path: Path, size: int) -> list[int]:
    """Where the ranges of a file end, in bytes from its start; the last one is its size."""
    header = _header(path)
    if header is None or not header.entries:
        return list(_cut(0, [size]))
    first = min(entry.begin for entry in header.entries.values())
    return [first, *_cut(first, sorted({entry.end for entry in header.entries.values()} - {first}))]


def _cut(begin: int, marks: list[int]) -> Iterator[int]:
    """Marks with some more between those that are far apart, and without those that are close together."""
    for mark in marks:
        while mark - begin > _LONGEST:
            begin += _LONGEST
            yield begin
        if mark - begin >= _SHORTEST or (mark == marks[-1] and mark > begin):
            yield mark
            begin = mark


def _header(path: Path) -> Header | None:
    """The header of a safetensors file; None of any other, and of one that is damaged."""
    if not is_safetensors(path):
        return None
    try:
        return read_header(path)
    except CheckpointError:
        return None


def place_of(path: Path, begin: int, end: int) -> str:
    """What is in a range: names of tensors where the file says them, else the bytes."""
    header = _header(path)
    entries = sorted(header.entries.items(), key=lambda item: item[1].begin) if header else []
    names = [name for name, entry in entries if entry.begin < end and entry.end > begin]
    if not names:
        return f"the bytes {begin} to {end}"
    shown = repr(names[0]) if len(names) == 1 else f"one of {names[0]!r} to {names[-1]!r}"
    return f"{shown} (bytes {begin} to {end})"


def hash_of(path: Path, begin: int, end: int) -> str:
    """xxh3_64 of a range, which is mapped where the system can: reading copies it, and takes twice as long.

    Raises:
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        return _mapped_hash(file, begin, end) or _read_hash(file, begin, end)


def _mapped_hash(file: FileIO, begin: int, end: int) -> str | None:
    advise = _advise()
    if advise is None or end - begin < _BUFFER:
        return None
    start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        # A private mapping, which ctypes takes for one that may be written to.
        pages = mmap.mmap(file.fileno(), end - start, access=mmap.ACCESS_COPY, offset=start)
    except (OSError, ValueError):
        return None
    with pages:
        first = ctypes.c_char.from_buffer(pages)
        populated = advise(ctypes.addressof(first), end - start, _POPULATE_READ) == 0
        del first
        if not populated:
            # What cannot be read would end the process as soon as it was touched.
            return None
        with memoryview(pages) as whole, whole[begin - start :] as part:
            return xxhash.xxh3_64(part).hexdigest()


@cache
def _advise() -> Any:
    try:
        advise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return None
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


def _read_hash(file: FileIO, begin: int, end: int) -> str:
    digest, buffer = xxhash.xxh3_64(), memoryview(bytearray(min(_BUFFER, end - begin)))
    file.seek(begin)
    while begin < end and (count := file.readinto(buffer[: end - begin])):
        digest.update(buffer[:count])
        begin += count
    return digest.hexdigest()
