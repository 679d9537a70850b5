"""Reading weights back from one file, a folder, or an index; nothing that is read can run code."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from accel_bigmodel.weight_files.header import read_header
from accel_bigmodel.weight_files.index import read_index
from accel_bigmodel.weight_files.names import SAFE_WEIGHTS_NAME, WEIGHTS_NAME, is_safetensors
from accel_bigmodel.weight_files.torch_files import check_torch_file
from accel_ops.pickle_check import PickleRefused
from accel_state.errors import CheckpointError

__all__ = ("WeightFile", "WeightSource", "find_weights", "load_weights", "load_weights_file")


@dataclass(frozen=True)
class WeightSource:
    """One file of a checkpoint and the weights to take from it; None: all it holds."""

    path: Path
    names: tuple[str, ...] | None = None

    def load(self, device: str | int | torch.device = "cpu") -> dict[str, Any]:
        """The weights by name, on `device`."""
        return load_weights_file(self.path, device, self.names)


def find_weights(path: str | os.PathLike[str]) -> tuple[WeightSource, ...]:
    """The files that make up the checkpoint at `path`.

    `path` may be a weight file, an index (`.json`), or a folder: there `pytorch_model.bin` is looked for first, then
    `model.safetensors`, then a single `*.index.json`.

    Raises:
        CheckpointError: nothing of the kind is there, or the index is bad.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise CheckpointError(
            f"Load weights from {str(path)!r}.", "There is no such file or folder.", "Check the spelling of the path."
        )
    if path.suffix != ".json":
        return (WeightSource(path),)
    files = read_index(path).names_by_file()
    return tuple(WeightSource(path.parent / file, tuple(names)) for file, names in sorted(files.items()))


def load_weights(path: str | os.PathLike[str], device: str | int | torch.device = "cpu") -> dict[str, Any]:
    """All weights of the checkpoint at `path`, as `find_weights` looks for it, by name and on `device`.

    On a CPU the tensors are mapped from the file, so that memory is used when they are.

    Raises:
        CheckpointError: a file is missing, truncated, corrupted, or holds Python objects other than weights.
    """
    weights: dict[str, Any] = {}
    for source in find_weights(path):
        weights.update(source.load(device))
    return weights


def load_weights_file(
    path: str | os.PathLike[str], device: str | int | torch.device = "cpu", names: Iterable[str] | None = None
) -> dict[str, Any]:
    """The weights of one file, or those of them that are named.

    Raises:
        CheckpointError: as `load_weights`, or a named weight is not in the file.
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
    for name in (WEIGHTS_NAME, SAFE_WEIGHTS_NAME):
        if (folder / name).is_file():
            return folder / name
    indexes = sorted(folder.glob("*.index.json"))
    if len(indexes) == 1:
        return indexes[0]
    found = f"{len(indexes)} index files: {', '.join(index.name for index in indexes)}" if indexes else "no index file"
    raise CheckpointError(
        f"Load weights from the folder {str(folder)!r}.",
        f"It holds neither {WEIGHTS_NAME} nor {SAFE_WEIGHTS_NAME}, and {found}.",
        "Name the weight file or the index itself.",
    )


def _load_safetensors(path: Path, device: str, names: tuple[str, ...] | None) -> dict[str, Any]:
    file = WeightFile(path, device)
    if names is not None:
        _check_present(path, names, file.header.entries)
    return {name: file.get(name) for name in (file.header.entries if names is None else names)}


class WeightFile:
    """An open safetensors file, checked, whose weights are mapped one by one.

    Args:
        path: the file.
        device: where its weights are put; on the CPU they are mapped, not read.

    Raises:
        CheckpointError: the file is missing, truncated or corrupted.
    """

    def __init__(self, path: Path, device: str = "cpu") -> None:
        self.path = path
        self.header = read_header(path)
        self._device = device
        with self._typed():
            # safetensors itself knows no device "meta".
            opened: Any = safe_open(path, framework="pt", device="cpu" if device == "meta" else device)
            self._file = opened.__enter__()

    def get(self, name: str) -> Tensor:
        """A weight.

        Raises:
            CheckpointError: the file does not hold it, or torch does not know its dtype.
        """
        _check_present(self.path, [name], self.header.entries)
        with self._typed():
            weight: Tensor = self._file.get_tensor(name)
        return weight.to(self._device)

    @contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError, AttributeError) as error:
            raise CheckpointError(
                f"Read the weights in {str(self.path)!r}.",
                f"{type(error).__name__}: {error}",
                "Fetch the file again, or install a safetensors and torch that know its dtypes.",
            ) from error


def _load_torch(path: Path, device: str | int | torch.device) -> dict[str, Any]:
    try:
        check_torch_file(path)
        # Mapping needs the zip format that torch.save writes since 1.6; older files are read as a whole.
        weights = torch.load(path, map_location=torch.device(device), weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, PickleRefused) as error:
        raise CheckpointError(
            f"Read the weights in {str(path)!r}.",
            f"It is not a plain file of tensors: {str(error).splitlines()[0]}",
            "If you trust whoever made it, read it yourself with torch.load and save its tensors again.",
        ) from error
    except Exception as error:  # a damaged pickle can make its reader raise anything
        first_line = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"Read the weights in {str(path)!r} ({os.path.getsize(path) if os.path.exists(path) else 0} bytes).",
            f"{type(error).__name__}: {first_line}",
            "The file is damaged or was not written by torch.save: fetch it again, or load an older checkpoint.",
        ) from error
    _check_weights(path, weights)
    return dict(weights)


def _check_weights(path: Path, weights: object) -> None:
    """A weight file maps names to tensors; only what `get_extra_state` of a module returned may be something else."""
    wrong = f"a {type(weights).__name__}"
    if isinstance(weights, Mapping):
        odd = [k for k, v in weights.items() if not isinstance(v, Tensor) and not str(k).endswith("_extra_state")]
        odd += [k for k in weights if not isinstance(k, str)]
        if not odd:
            return
        wrong = f"{type(weights[odd[0]]).__name__} under {odd[0]!r}"
    raise CheckpointError(
        f"Read the weights in {str(path)!r}.",
        f"It holds {wrong} where a mapping of names to tensors is expected.",
        "If the weights lie deeper inside, take them out with torch.load and save them by themselves.",
    )


def _check_present(path: Path, names: Iterable[str], present: Mapping[str, Any]) -> None:
    missing = [name for name in names if name not in present]
    if missing:
        raise CheckpointError(
            f"Read {missing[0]!r} from {str(path)!r}.",
            f"The file does not hold it, nor {len(missing) - 1} others that the index places there.",
            "The index and the file do not belong together: fetch both again.",
        )
