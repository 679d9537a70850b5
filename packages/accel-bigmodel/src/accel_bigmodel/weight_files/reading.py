"""Reads weights from one file, a folder, or an index; the content of a file can never run code."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accel_bigmodel.weight_files.metadata import TensorInfo, read_header, read_index
from accel_bigmodel.weight_files.names import SAFE_WEIGHTS_NAME, WEIGHTS_NAME, index_name, is_safetensors
from accel_bigmodel.weight_files.range_reader import RangeReader
from accel_bigmodel.weight_files.torch_files import load_torch_file
from accel_state.errors import CheckpointError, CheckpointNameError

__all__ = (
    "FileWeight",
    "WeightFile",
    "WeightSource",
    "find_weights",
    "load_weights",
    "load_weights_file",
    "open_weights",
)


@dataclass(frozen=True)
class WeightSource:
    """One file of a checkpoint and the weights to read from it; None for all."""

    path: Path
    names: tuple[str, ...] | None = None

    def load(self, device: str | int | torch.device = "cpu") -> dict[str, Any]:
        """Load the weights by name, on `device`."""
        return load_weights_file(self.path, device, self.names)


def find_weights(path: str | os.PathLike[str]) -> tuple[WeightSource, ...]:
    """Find the files of the checkpoint at `path`.

    `path` may be a weight file, an index (`.json`), or a folder: there it is the last written one of
    `pytorch_model.bin`, `model.safetensors` and their indexes, or else a single `*.index.json`.

    Raises:
        CheckpointError: there is no such file or folder, or the index is damaged.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise CheckpointError(
            f"Cannot load weights from {str(path)!r}.",
            "There is no such file or folder.",
            "Check the spelling of the path.",
        )
    if path.suffix != ".json":
        return (WeightSource(path),)
    files = read_index(path).names_by_file()
    return tuple(WeightSource(path.parent / file, tuple(names)) for file, names in sorted(files.items()))


def load_weights(path: str | os.PathLike[str], device: str | int | torch.device = "cpu") -> dict[str, Any]:
    """Load all weights of the checkpoint at `path`, found as by `find_weights`, by name and on `device`.

    On a CPU the tensors are mapped from the file, so that they use memory only when they are read.

    Raises:
        CheckpointError: a file is missing, truncated, corrupted, or contains Python objects other than weights.
    """
    weights: dict[str, Any] = {}
    for source in find_weights(path):
        weights.update(source.load(device))
    return weights


def load_weights_file(
    path: str | os.PathLike[str], device: str | int | torch.device = "cpu", names: Iterable[str] | None = None
) -> dict[str, Any]:
    """Load the weights of one file, or only the given ones.

    Raises:
        CheckpointError: as `load_weights`, or one of the given weights is not in the file.
    """
    path = Path(path)
    names = None if names is None else tuple(names)
    if is_safetensors(path):
        return _load_safetensors(path, str(torch.device(device)), names)
    weights = _load_torch(path, device)
    if names is None:
        return weights
    _check_present(path, names, weights)
    return {name: weights[name] for name in names}


def _in_folder(folder: Path) -> Path:
    names = (WEIGHTS_NAME, SAFE_WEIGHTS_NAME)
    usual = [folder / name for name in (*names, *map(index_name, names))]
    if there := [path for path in usual if path.is_file()]:
        # A folder may hold what an earlier save wrote in the other format; of equal times, the first one counts.
        return max(there, key=lambda path: path.stat().st_mtime_ns)
    indexes = sorted(folder.glob("*.index.json"))
    if len(indexes) == 1:
        return indexes[0]
    found = f"{len(indexes)} index files: {', '.join(index.name for index in indexes)}" if indexes else "no index file"
    raise CheckpointNameError(
        f"Cannot load weights from the folder {str(folder)!r}.",
        f"It contains neither {WEIGHTS_NAME} nor {SAFE_WEIGHTS_NAME}, and {found}.",
        "Give the path of the weight file or of the index.",
    )


def _load_safetensors(path: Path, device: str, names: tuple[str, ...] | None) -> dict[str, Any]:
    file = WeightFile(path, device)
    if names is not None:
        _check_present(path, names, file.header.entries)
    return {name: file.get(name) for name in (file.header.entries if names is None else names)}


class WeightFile:
    """A safetensors file with a checked header; its weights are mapped one by one.

    Args:
        path: the file.
        device: device for its weights; on the CPU they are mapped, not read.

    Raises:
        CheckpointError: the file is missing, truncated or corrupted.
    """

    def __init__(self, path: Path, device: str = "cpu") -> None:
        self.path = path
        self.header = read_header(path)
        self._device = device

    def get(self, name: str) -> Tensor:
        """Load one weight.

        Raises:
            CheckpointError: the file does not contain it, or torch does not support its dtype.
        """
        _check_present(self.path, [name], self.header.entries)
        with self._typed():
            weight: Tensor = self._opened.get_tensor(name)
        return weight.to(self._device)

    @cached_property
    def _opened(self) -> Any:
        # safetensors itself does not support the device "meta".
        opened: Any = safe_open(self.path, framework="pt", device="cpu" if self._device == "meta" else self._device)
        return opened.__enter__()

    @contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError, AttributeError) as error:
            raise CheckpointError(
                f"Cannot read the weights in {str(self.path)!r}.",
                f"{type(error).__name__}: {error}",
                "Download the file again, or install versions of safetensors and torch that support its dtypes.",
            ) from error


class FileWeight:
    """A weight in a checked file, which is not read yet.

    Attributes:
        path: the file.
        name: its name there.
        shape: its shape.
        dtype: its dtype.
        entry: location of its bytes; None in a file of `torch.save`.
    """

    def __init__(self, name: str, path: Path, held: WeightFile | Tensor) -> None:
        self.name, self.path = name, path
        self._held = held
        self.entry: TensorInfo | None = None
        if isinstance(held, Tensor):
            self.shape, self.dtype = tuple(held.shape), held.dtype
        else:
            self.entry = held.header.entries[name]
            self.shape, self.dtype = self.entry.shape, _torch_dtype(path, name, self.entry)

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def mapped(self) -> Tensor:
        """The weight, mapped from its file if possible."""
        return self._held if isinstance(self._held, Tensor) else self._held.get(self.name)

    def read_into(self, reader: RangeReader, target: Tensor, starts: Sequence[int] | None = None) -> None:
        """Add a tensor to a reader, which fills it with the weight, or with a part that has the tensor's shape.

        Args:
            starts: first index of the part in each dimension.
        """
        if self.entry is not None:
            reader.add(target, self.path, self.entry.begin, self.dtype, self.shape, starts)
            return
        weight = self.mapped()
        for dimension, start in enumerate(starts or ()):
            weight = weight.narrow(dimension, start, target.shape[dimension])
        reader.add_copy(target, weight)


def open_weights(sources: Iterable[WeightSource]) -> dict[str, FileWeight]:
    """All weights of a checkpoint by name; every file is checked before the first one is read.

    Raises:
        CheckpointError: a file is missing, truncated or corrupted, holds Python objects other than weights, lacks a
            weight that the index lists for it, or has a dtype that torch does not support.
    """
    found: dict[str, FileWeight] = {}
    for source in sources:
        held: Mapping[str, Any]
        if is_safetensors(source.path):
            file = WeightFile(source.path)
            held = dict.fromkeys(file.header.entries, file)
        else:
            held = _load_torch(source.path, "cpu")
        names = tuple(held) if source.names is None else source.names
        _check_present(source.path, names, held)
        # Only values from a module's `get_extra_state` may be other objects.
        weights = {name: held[name] for name in names if isinstance(held[name], (Tensor, WeightFile))}
        found.update({name: FileWeight(name, source.path, weight) for name, weight in weights.items()})
    return found


def _torch_dtype(path: Path, name: str, entry: TensorInfo) -> torch.dtype:
    dtype = getattr(torch, entry.torch_dtype or "none", None)
    if dtype is None:
        raise CheckpointError(
            f"Cannot read {name!r} at offset {entry.begin} of {str(path)!r}.",
            f"torch {torch.__version__} does not support its dtype {entry.dtype}.",
            "Install a version of torch that supports it, or convert the checkpoint.",
        )
    return dtype  # type: ignore[no-any-return]


def _load_torch(path: Path, device: str | int | torch.device) -> dict[str, Any]:
    try:
        weights = load_torch_file(path, mapped=True, map_location=torch.device(device))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"Cannot read the weights in {str(path)!r}.",
            f"It is not a plain file of tensors: {str(error).splitlines()[0]}",
            "If you trust its author, read it with torch.load(weights_only=False), and save only its tensors again.",
        ) from error
    except Exception as error:  # a damaged pickle can make its reader raise any error
        first_line = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"Cannot read the weights in {str(path)!r} ({os.path.getsize(path) if os.path.exists(path) else 0} bytes).",
            f"{type(error).__name__}: {first_line}",
            "The file is damaged or was not written by torch.save: download it again, or load an older checkpoint.",
        ) from error
    _check_weights(path, weights)
    return dict(weights)


def _check_weights(path: Path, weights: object) -> None:
    """Check that a weight file maps names to tensors; only values from `get_extra_state` may be other objects."""
    wrong = f"a {type(weights).__name__}"
    if isinstance(weights, Mapping):
        odd = [k for k, v in weights.items() if not isinstance(v, Tensor) and not str(k).endswith("_extra_state")]
        odd += [k for k in weights if not isinstance(k, str)]
        if not odd:
            return
        wrong = f"{type(weights[odd[0]]).__name__} under {odd[0]!r}"
    raise CheckpointError(
        f"Cannot read the weights in {str(path)!r}.",
        f"It contains {wrong} where a mapping of names to tensors is expected.",
        "If the weights are nested deeper, read the file with torch.load, and save only their mapping.",
    )


def _check_present(path: Path, names: Iterable[str], present: Mapping[str, Any]) -> None:
    missing = [name for name in names if name not in present]
    if missing:
        raise CheckpointError(
            f"Cannot read {missing[0]!r} from {str(path)!r}.",
            f"The file does not hold it, nor {len(missing) - 1} others that the index places there.",
            "The index and the file do not match: download both again.",
        )
