"""The header of a safetensors file, read and checked against the size of the file before anything is mapped.

Format (https://huggingface.co/docs/safetensors): eight bytes with the length of the header, little-endian; the header
as JSON, name to dtype, shape and offsets; the data. A mapped file that turns out shorter than its header says would end
the process with a bus error at the first use of the missing part.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accel_state.errors import CheckpointError
from accel_state.untrusted import open_regular, parse_json, printable

__all__ = ("Entry", "Header", "read_header")

_LENGTH = 8
_LONGEST = 100_000_000
_MOST_DIMENSIONS = 64
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "C128": 128, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: `dtype` as the format names it, `begin` and `end` in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file holds: entries by tensor name, and the metadata (text to text)."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


def read_header(path: str | os.PathLike[str]) -> Header:
    """The checked header of a safetensors file; no tensor is read.

    Raises:
        CheckpointError: the file cannot be read, is truncated, or its header contradicts itself; names the file, the
            first tensor concerned, and the numbers.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_length(path, file.read(_LENGTH), size)
            document = _parse(path, file.read(length))
    except OSError as error:
        raise _unreadable(path, f"It cannot be read: {error}.") from error
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _unreadable(path, "Its metadata are not a table of texts.")
    entries = {name: _entry(path, name, value, _LENGTH + length) for name, value in document.items()}
    _check_extent(path, entries, _LENGTH + length, size)
    return Header(entries, metadata)


def _unreadable(path: object, obstacle: str) -> CheckpointError:
    return CheckpointError(
        f"Read the weights in {os.fspath(path)!r}.",  # type: ignore[call-overload]
        printable(obstacle),
        "The file is damaged or not a safetensors file: fetch it again, or load an older checkpoint.",
    )


def _header_length(path: object, start: bytes, size: int) -> int:
    if len(start) < _LENGTH:
        raise _unreadable(path, f"It has {size} bytes; the length of the header alone takes {_LENGTH}.")
    length = int.from_bytes(start, "little")
    if length > min(_LONGEST, size - _LENGTH):
        raise _unreadable(path, f"Its header should take {length} bytes, the file has {size}.")
    return length


def _parse(path: object, text: bytes) -> dict[str, Any]:
    try:
        document = parse_json(text, depth=4)
    except ValueError as error:
        raise _unreadable(path, f"Its header is damaged. {error}") from error
    if not isinstance(document, dict):
        raise _unreadable(path, f"Its header is a JSON {type(document).__name__}, not an object.")
    return document


def _entry(path: object, name: str, value: Any, data: int) -> Entry:
    """Checks one entry by itself: known dtype, whole numbers, and as many bytes as the shape needs."""
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise _unreadable(path, f"Its header says of {name!r} only {value!r:.200}.") from error
    numbers = (*shape, begin, end)
    if len(shape) > _MOST_DIMENSIONS:
        raise _unreadable(path, f"Its header gives {name!r} {len(shape)} dimensions.")
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers) or begin > end:
        raise _unreadable(path, f"Its header gives {name!r} the shape {shape} and the offsets {begin} to {end}.")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise _unreadable(path, f"Its header gives {name!r} the unknown dtype {dtype!r:.200}.")
    needed = math.prod(shape) * _BITS[dtype]
    if needed != 8 * (end - begin):
        raise _unreadable(
            path, f"{name!r} of shape {shape} and dtype {dtype} takes {needed // 8} bytes, not {end - begin}."
        )
    return Entry(dtype, shape, data + begin, data + end)


def _check_extent(path: object, entries: Mapping[str, Entry], data: int, size: int) -> None:
    """The tensors must fill the rest of the file without a gap or an overlap."""
    position = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise _unreadable(path, f"{name!r} begins at byte {entry.begin}; the tensor before it ends at {position}.")
        if entry.end > size:
            raise _unreadable(path, f"{name!r} ends at byte {entry.end}, the file has {size} bytes: it is truncated.")
        position = entry.end
    if position != size:
        raise _unreadable(path, f"Its tensors end at byte {position}, the file has {size} bytes.")
