"""Files of `torch.save`, read without running code from them, and with errors that name the file.

`save` and `load` are for users: one object in one file, written only by the main process (of each node).
"""

from __future__ import annotations

import codecs
import io
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import numpy
import torch

from accel_bigmodel.weight_files import load_weights_file, save_weights_file
from accel_bigmodel.weight_files.names import is_safetensors
from accel_bigmodel.weight_files.reading import load_torch_file
from accel_state import current
from accel_state.errors import CheckpointError, UnknownKind

__all__ = (
    "NUMPY_GLOBALS",
    "as_numpy",
    "load",
    "read",
    "read_open",
    "save",
    "write",
)


def write(state: Any, path: Path) -> None:
    """`torch.save`.

    Raises:
        CheckpointError: the state contains objects that cannot be pickled, or writing to disk failed.
    """
    try:
        torch.save(state, path)
    except (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError) as error:
        path.unlink(missing_ok=True)
        raise CheckpointError(
            f"Cannot write {path.name} in {path.parent}.",
            f"{type(error).__name__}: {error}",
            "Check the free space and the permissions of the folder, and that the object's state is plain data.",
        ) from error


def read(path: Path, map_location: Any = "cpu", *, trusted: bool = False, mapped: bool = False, **options: Any) -> Any:
    """`torch.load` of plain data: tensors, numbers, strings and containers of them, and numpy arrays.

    Args:
        path: the file.
        map_location: where tensors are read to.
        trusted: read any pickle, which may run code from the file.
        mapped: memory-map the tensors, which the caller copies at once; see `load_torch_file`.
        options: further options of `torch.load`.

    Raises:
        CheckpointError: the file is missing or damaged, or contains more than plain data.
    """
    try:
        if trusted:
            return torch.load(path, map_location=map_location, weights_only=False, **options)
        with torch.serialization.safe_globals(NUMPY_GLOBALS):
            return as_numpy(load_torch_file(path, mapped=mapped, map_location=map_location, **options))
    except FileNotFoundError:
        raise CheckpointError(
            f"Cannot read {path.name} from {path.parent}.",
            "The file does not exist.",
            "Use another folder: this one is incomplete, or was saved from other objects.",
        ) from None
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"Cannot read {path.name} from {path.parent}.",
            f"The file is damaged or contains more than plain data: {_reason(error)}",
            "If you trust the author of the file, load it with load_kwargs={'weights_only': False}, which may run "
            "code from it.",
        ) from error
    except Exception as error:  # a damaged pickle can make its reader raise any error
        raise CheckpointError(
            f"Cannot read {path.name} ({_size(path)} bytes) from {path.parent}.",
            f"The file is damaged: {type(error).__name__}: {_reason(error)}",
            "Load an older checkpoint.",
        ) from error


def read_open(file: IO[bytes], name: str, map_location: Any = "cpu", **options: Any) -> Any:
    """`read` for an open, seekable file, from its first byte.

    Args:
        file: the file.
        name: its name in errors.
        map_location: where tensors are read to.
        options: further options of `torch.load`.

    Raises:
        CheckpointError: the file is damaged or contains more than plain data.
    """
    try:
        file.seek(0)
        sparse: Any = torch.sparse.check_sparse_tensor_invariants
        with torch.serialization.safe_globals(NUMPY_GLOBALS), sparse():
            return as_numpy(torch.load(file, map_location=map_location, weights_only=True, **options))
    except Exception as error:  # a damaged pickle can make its reader raise any error
        raise CheckpointError(
            f"Cannot read {name!r} from a checkpoint.",
            f"The file is damaged or contains more than plain data: {_reason(error)}",
            "Load an older checkpoint that you trust.",
        ) from error


def _reason(error: Exception) -> str:
    return (str(error).split("WeightsUnpickler error:")[-1].strip().splitlines() or [""])[0]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write an object, on the main process only.

    An existing file is unchanged until the new one is complete.

    Args:
        obj: the object; with `safe_serialization`, a mapping of names to tensors.
        f: path of the file, or an open file.
        save_on_each_node: write on the main process of each node, for nodes without a shared file system.
        safe_serialization: use safetensors instead of `torch.save`.

    Raises:
        CheckpointError: it cannot be written.
        UnknownKind: `obj` is not a mapping of names to tensors, which safetensors requires.
    """
    topology = current.process_or_start().topology
    if not (topology.is_local_main if save_on_each_node else topology.rank == 0):
        return
    if safe_serialization:
        _write_safely(obj, f)
    elif isinstance(f, (str, os.PathLike)):
        _replace(Path(f), lambda path: write(obj, path))
    else:
        torch.save(obj, f)


def _write_safely(obj: Any, f: Any) -> None:
    if not isinstance(obj, Mapping) or not isinstance(f, (str, os.PathLike)):
        raise UnknownKind(
            f"Cannot save a {type(obj).__name__} with safe_serialization=True.",
            "safetensors stores only a mapping of names to tensors, in a file with a path.",
            "Pass such a mapping and a path, or remove safe_serialization.",
        )
    path = Path(f)
    if is_safetensors(path):
        save_weights_file(obj, path)
    else:
        _replace(path, lambda beside: save_weights_file(obj, beside), suffix=".safetensors")


def _replace(path: Path, write: Any, suffix: str = "") -> None:
    """Write a temporary file, and rename it when it is complete."""
    beside = path.with_name(f".{path.name}.tmp-{os.urandom(8).hex()}{suffix}")
    try:
        write(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Read a file of `save`: tensors, numbers, strings and containers of them.

    Args:
        f: path of the file, or an open file.
        map_location: the device to which tensors are read; None: the original device.
        kwargs: options of `torch.load`; `weights_only=False` reads any pickle, which may run code from the file.

    Raises:
        CheckpointError: the file is missing or damaged, or contains more than plain data.
    """
    trusted = not kwargs.pop("weights_only", True)
    if not isinstance(f, (str, os.PathLike)):
        if trusted:
            return torch.load(f, map_location=map_location, weights_only=False, **kwargs)
        rest = io.BytesIO(f.read()) if f.tell() else f
        return read_open(rest, str(getattr(f, "name", "an open file")), map_location, **kwargs)
    path = Path(f)
    if is_safetensors(path):
        return load_weights_file(path, map_location or "cpu")
    return read(path, map_location, trusted=trusted, **kwargs)


# ---------------------------------------------------------------------- arrays and scalars of numpy

# They are made without numpy's own unpickling. Other programs save the state of numpy's generator as an array. numpy's
# functions would take the bytes of a file for addresses of objects if the file says that they are; so the names of
# these functions stand for the classes here.

_DTYPE_NAME: Final = re.compile(r"[<>|=]?[biufc]\d{1,2}")
"""The names of types of numbers; numpy would also evaluate shapes and fields in a text, and reserve their memory."""


class _Type:
    """In the place of `numpy.dtype`: a type of numbers."""

    def __init__(self, text: str, align: bool = False, copy: bool = True) -> None:
        if not isinstance(text, str) or _DTYPE_NAME.fullmatch(text) is None:
            raise ValueError(f"an array of {text!s:.20} is not one of numbers")
        self.dtype = numpy.dtype(text)

    def __setstate__(self, state: Any) -> None:
        if tuple(state) not in [(3, order, None, None, None, -1, -1, 0) for order in "<>|="]:
            raise ValueError("a type of numbers has another state than its order of bytes")
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """In the place of `numpy.ndarray`: an array whose content follows as its state."""

    value: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, data = state
        if type(kind) is not _Type or type(data) is not bytes:
            raise ValueError("an array does not consist of the bytes of numbers")
        # numpy's own reading, too, brings the bytes into the order of this machine.
        flat = numpy.frombuffer(data, kind.dtype).astype(kind.dtype.newbyteorder("="))
        self.value = flat.reshape(tuple(shape), order="F" if fortran else "C")


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    if kind is not _Array or tuple(shape) != (0,) or code != b"b":
        raise ValueError("an array is not made as numpy makes it")
    return _Array()


def _scalar(kind: Any, data: Any) -> Any:
    if type(kind) is not _Type or type(data) is not bytes or len(data) != kind.dtype.itemsize:
        raise ValueError("a number does not consist of its bytes")
    return numpy.frombuffer(data, kind.dtype)[0]


def _encode(text: Any, encoding: Any) -> bytes:
    if encoding != "latin1" or type(text) is not str:
        raise ValueError("bytes are not stored as text in Latin-1")
    return codecs.encode(text, "latin1")


NUMPY_GLOBALS: Final[list[Any]] = [
    *((_reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    (_Array, "numpy.ndarray"),
    (_Type, "numpy.dtype"),
    (_encode, "_codecs.encode"),
    bytes,
    io.BytesIO,
]
"""For `torch.serialization.safe_globals`; byte streams are those of Transformer Engine."""


def as_numpy(item: Any) -> Any:
    """What was read with `NUMPY_GLOBALS`, with arrays of numpy in their place; containers are changed in place."""
    return _converted(item, {})


def _converted(item: Any, done: dict[int, Any]) -> Any:
    if isinstance(item, _Array):
        return item.value
    if not isinstance(item, (dict, list, tuple)) or id(item) in done:
        return done.get(id(item), item)
    done[id(item)] = item
    if isinstance(item, dict):
        for key, value in item.items():
            item[key] = _converted(value, done)
    elif isinstance(item, list):
        item[:] = [_converted(value, done) for value in item]
    elif type(item) is tuple:
        parts = tuple(_converted(value, done) for value in item)
        changed = any(new is not old for new, old in zip(parts, item, strict=True))
        done[id(item)] = parts if changed else item
    return done[id(item)]
