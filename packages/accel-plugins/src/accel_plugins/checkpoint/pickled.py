"""Files written by `torch.save`: read back so that nothing in them can run code, and with errors that name the file."""

from __future__ import annotations

import codecs
import io
import pickle
from pathlib import Path
from typing import Any, Final

import numpy
import torch

from accel_state.errors import CheckpointError

__all__ = ("SAFE_GLOBALS", "read", "read_bytes", "write")

_MULTIARRAY: Any = getattr(numpy, "_core", None) or numpy.core  # numpy 1 has it under the second name

SAFE_GLOBALS: Final[tuple[Any, ...]] = (
    _MULTIARRAY.multiarray._reconstruct,
    _MULTIARRAY.multiarray.scalar,
    numpy.ndarray,
    numpy.dtype,
    codecs.encode,
    io.BytesIO,
    *(
        kind
        for name in dir(getattr(numpy, "dtypes", None))
        if isinstance(kind := getattr(numpy.dtypes, name), type) and issubclass(kind, numpy.dtype)
    ),
)
"""What arrays and scalars of numpy, as in the state of its generator, are made with when they are read, and what holds
bytes, as layers of Transformer Engine may save them."""


def write(state: Any, path: Path) -> None:
    """`torch.save`.

    Raises:
        CheckpointError: the state holds what cannot be pickled, or the disk refuses.
    """
    try:
        torch.save(state, path)
    except (OSError, RuntimeError, pickle.PicklingError, AttributeError, TypeError) as error:
        path.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path.name} was to be written in {path.parent}.",
            f"{type(error).__name__}: {error}",
            "Check the free space and the permissions of the folder, and that the object's state is plain data.",
        ) from error


def read(path: Path, map_location: Any = "cpu", *, trusted: bool = False, **options: Any) -> Any:
    """`torch.load` of plain data: tensors, numbers, texts and containers of them, and numpy arrays.

    Args:
        path: the file.
        map_location: where tensors are read to.
        trusted: read any pickle, which may run code that the file brings.
        options: further ones of `torch.load`.

    Raises:
        CheckpointError: the file is missing, damaged, or holds more than plain data.
    """
    try:
        with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
            return torch.load(path, map_location=map_location, weights_only=not trusted, **options)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.name} was to be read from {path.parent}.",
            "There is no such file.",
            "The folder is no checkpoint of such objects, or it is incomplete: name another one.",
        ) from None
    except pickle.UnpicklingError as error:
        reason = str(error).split("WeightsUnpickler error:")[-1].strip().splitlines()[0]
        raise CheckpointError(
            f"{path.name} was to be read from {path.parent}.",
            f"It holds more than plain data, or it is damaged: {reason}",
            "If you trust whoever wrote it, load it with load_kwargs={'weights_only': False}; that runs its code.",
        ) from error
    except Exception as error:  # a damaged pickle can make its reader raise anything
        reason = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"{path.name} ({_size(path)} bytes) was to be read from {path.parent}.",
            f"It is damaged: {type(error).__name__}: {reason}",
            "Load an older checkpoint.",
        ) from error


def read_bytes(source: io.BytesIO, name: str) -> Any:
    """`read` of what was written into memory.

    Raises:
        CheckpointError: it is damaged or holds more than plain data.
    """
    try:
        with torch.serialization.safe_globals(list(SAFE_GLOBALS)):
            return torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can make its reader raise anything
        raise CheckpointError(
            f"{name!r} was to be read from a checkpoint.",
            f"It is damaged or holds more than plain data: {(str(error).splitlines() or [''])[0]}",
            "Load an older checkpoint, one that you trust.",
        ) from error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
