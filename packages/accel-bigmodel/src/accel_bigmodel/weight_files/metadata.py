"""The metadata of weight files: the header of a safetensors file, and the index of a sharded checkpoint.

Both are checked against the files before a tensor is read or mapped: if a mapped file were shorter than its header
specifies, the process would end with a bus error at the first use of the missing part.

Format of a safetensors file (https://huggingface.co/docs/safetensors): eight bytes with the length of the header,
little-endian; the header as JSON, name to dtype, shape and offsets; the data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from accel_state.errors import CheckpointError
from accel_state.untrusted import dict_of, open_regular, parse_json, path_inside, printable, read_json, record, text

__all__ = ("Header", "TensorInfo", "WeightIndex", "read_header", "read_index")

_LENGTH = 8
_LONGEST = 100_000_000
_MOST_DIMENSIONS = 64
_DTYPES: Final[Mapping[str, tuple[int, str]]] = {
    "BOOL": (8, "bool"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
    "C128": (128, "complex128"),
    "F4": (4, ""),
    "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""),
}
"""Dtypes of the format: bits of an element, and the name in torch; torch has no dtype for the last ones."""


@dataclass(frozen=True)
class TensorInfo:
    """The location of one tensor: `dtype` as named by the format, `begin` and `end` in bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def torch_dtype(self) -> str:
        """Name of the dtype in torch; empty where torch has none."""
        return _DTYPES[self.dtype][1]


@dataclass(frozen=True)
class Header:
    """The content of a safetensors file: entries by tensor name, and the metadata (text to text)."""

    entries: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of a safetensors file, without reading a tensor.

    Raises:
        CheckpointError: the file cannot be read, is truncated, or its header contradicts itself; the message states the
            file, the first tensor with an error, and the numbers.
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
        raise _unreadable(path, "Its metadata is not a mapping of texts.")
    entries = {name: _entry(path, name, value, _LENGTH + length) for name, value in document.items()}
    _check_extent(path, entries, _LENGTH + length, size)
    return Header(entries, metadata)


def _unreadable(path: object, obstacle: str) -> CheckpointError:
    return CheckpointError(
        f"Cannot read the weights in {os.fspath(path)!r}.",  # type: ignore[call-overload]
        printable(obstacle),
        "The file is damaged or not a safetensors file: download it again, or load an older checkpoint.",
    )


def _header_length(path: object, start: bytes, size: int) -> int:
    if len(start) < _LENGTH:
        raise _unreadable(path, f"It has {size} bytes, but the length of the header itself takes {_LENGTH}.")
    length = int.from_bytes(start, "little")
    if length > min(_LONGEST, size - _LENGTH):
        raise _unreadable(path, f"Its header should have {length} bytes, but the file has only {size}.")
    return length


def _parse(path: object, text: bytes) -> dict[str, Any]:
    try:
        document = parse_json(text, depth=4)
    except ValueError as error:
        raise _unreadable(path, f"Its header is damaged. {error}") from error
    if not isinstance(document, dict):
        raise _unreadable(path, f"Its header is a JSON {type(document).__name__}, not an object.")
    return document


def _entry(path: object, name: str, value: Any, data: int) -> TensorInfo:
    """Check one entry separately: a known dtype, integers, and the number of bytes that the shape needs."""
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise _unreadable(path, f"The entry of {name!r} in its header is not valid: {value!r:.200}.") from error
    numbers = (*shape, begin, end)
    if len(shape) > _MOST_DIMENSIONS:
        raise _unreadable(path, f"Its header gives {name!r} {len(shape)} dimensions.")
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers) or begin > end:
        raise _unreadable(path, f"Its header gives {name!r} the shape {shape} and the offsets {begin} to {end}.")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _unreadable(path, f"Its header gives {name!r} the unknown dtype {dtype!r:.200}.")
    needed = math.prod(shape) * _DTYPES[dtype][0]
    if needed != 8 * (end - begin):
        raise _unreadable(
            path, f"{name!r} of shape {shape} and dtype {dtype} takes {needed // 8} bytes, not {end - begin}."
        )
    return TensorInfo(dtype, shape, data + begin, data + end)


def _check_extent(path: object, entries: Mapping[str, TensorInfo], data: int, size: int) -> None:
    """Check that the tensors fill the rest of the file without a gap or an overlap."""
    position = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise _unreadable(path, f"{name!r} begins at byte {entry.begin}; the tensor before it ends at {position}.")
        if entry.end > size:
            raise _unreadable(path, f"{name!r} ends at byte {entry.end}, the file has {size} bytes: it is truncated.")
        position = entry.end
    if position != size:
        raise _unreadable(path, f"Its tensors end at byte {position}, the file has {size} bytes.")


_WEIGHT_MAP: Final = dict_of(text())
_SHAPE: Final = record({"weight_map": _WEIGHT_MAP})


def _index_shape(value: Any) -> str:
    """The shape of an index: with a weight map and metadata, or the weight map alone."""
    return "" if value and not _WEIGHT_MAP(value) else _SHAPE(value)


@dataclass(frozen=True)
class WeightIndex:
    """Weight name to file name, relative to the folder of the index, and the size of all weights in bytes."""

    weight_map: Mapping[str, str]
    total_size: int

    def text(self) -> str:
        """The index as JSON: two spaces of indentation, sorted keys, a newline at the end."""
        document = {"metadata": {"total_size": self.total_size}, "weight_map": dict(self.weight_map)}
        return json.dumps(document, indent=2, sort_keys=True) + "\n"

    def names_by_file(self) -> dict[str, list[str]]:
        """The inverse map: file name to the weights in it."""
        files: dict[str, list[str]] = {}
        for name, file in self.weight_map.items():
            files.setdefault(file, []).append(name)
        return files


def read_index(path: str | os.PathLike[str]) -> WeightIndex:
    """Read and check an index: every file in it must exist, in its folder or below.

    Some tools write the weight map alone, without metadata around it.

    Raises:
        CheckpointError: the index cannot be read, has no weight map, or lists files that are missing or outside its
            folder.
    """
    path = Path(path)
    try:
        document = read_json(path, _index_shape)
    except OSError as error:
        raise _bad_index(path, f"It cannot be read: {error}.") from error
    except ValueError as error:
        raise _bad_index(path, f"It is damaged. {error}") from error
    if "weight_map" not in document or isinstance(document["weight_map"], str):
        document = {"weight_map": document}
    weight_map = document["weight_map"]
    files = dict.fromkeys(weight_map.values())
    try:
        # A download cache stores files elsewhere and links to them.
        missing = sorted(file for file in files if not os.path.isfile(path_inside(path.parent, file, links_out=True)))
    except ValueError as error:
        raise _bad_index(path, f"It lists a file outside its folder: {error}.") from error
    if missing:
        some = ", ".join(f"{file:.200}" for file in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise _bad_index(path, f"{len(missing)} of the {len(files)} files that it lists are missing: {some}.")
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return WeightIndex(weight_map, int(total) if isinstance(total, int) else 0)


def _bad_index(path: Path, obstacle: str) -> CheckpointError:
    return CheckpointError(
        f"Cannot read the weights listed in {str(path)!r}.",
        printable(obstacle),
        "Download the index and all of its files again into one folder.",
    )
