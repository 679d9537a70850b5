"""Weights on the disk: raw files or safetensors files, the index that lists them, and memory mapping."""

from __future__ import annotations

import ctypes
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from accel_bigmodel.sizes import convert_bytes, torch_dtype
from accel_bigmodel.weight_files.reading import StoredWeight, WeightFile
from accel_state.errors import CheckpointError, SettingError
from accel_state.untrusted import (
    dict_of,
    integer,
    list_of,
    open_regular,
    path_inside,
    printable,
    quoted,
    read_json,
    record,
    text,
)

__all__ = (
    "INDEX_NAME",
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "load_offloaded_weight",
    "offload_entry",
    "offload_state_dict",
    "offload_weight",
    "read_offload_index",
    "save_offload_index",
    "weight_file",
)


def offload_weight(
    weight: Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: MutableMapping[str, dict[str, Any]] | None = None,
) -> MutableMapping[str, dict[str, Any]] | None:
    """Write a weight into the folder as `<weight_name>.dat`, raw and in C order, and add it to `index`.

    Args:
        weight: a tensor on any device except meta.
        weight_name: its name in the model.
        offload_folder: folder of the file, created if it is missing.
        index: receives the dtype and shape of the weight under its name.

    Returns:
        `index`.

    Raises:
        CheckpointError: the weight has no data, or the disk rejects the write; an older file of this weight is
            unchanged.
    """
    path = weight_file(offload_folder, weight_name)
    if weight.is_meta:
        raise CheckpointError(
            f"Cannot offload {weight_name!r} to {str(path)!r}.",
            "It is on the meta device and has no data.",
            "Load it first.",
        )
    data = weight.detach().to("cpu").contiguous()
    # An empty weight gets one byte, because other readers map the file, and an empty file cannot be mapped.
    _replace(path, _bytes_of(data) or b"\0", f"Cannot offload {weight_name!r} ({data.nbytes} bytes) to {str(path)!r}.")
    if index is not None:
        index[weight_name] = {"dtype": str(data.dtype).removeprefix("torch."), "shape": list(data.shape)}
    return index


def offload_entry(weight: StoredWeight) -> dict[str, Any]:
    """The entry of an index for a weight that stays in its safetensors file."""
    return {"safetensors_file": str(weight.path.absolute()), "weight_name": weight.name}


def _replace(path: Path, content: bytes | memoryview, failed: str) -> None:
    """Write a new file and rename it over the old one, which may be mapped, even by the tensor being written.

    Raises:
        CheckpointError: the disk rejects the write; an old file is unchanged, and `failed` is the first sentence of the
            message.
    """
    # The name is not longer than those of the other files.
    beside = path.with_name(f".tmp-{os.urandom(8).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(content)
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise CheckpointError(
            failed,
            f"{type(error).__name__}: {error}",
            "Use an offload folder that you may write to, with enough free space.",
        ) from error


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, without a copy."""
    if tensor.nbytes == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> Tensor:
    """Map a weight that `offload_weight` wrote; it uses memory only when its values are read.

    Args:
        weight_info: its entry in the index.

    Raises:
        CheckpointError: the file is missing, or shorter than its entry specifies.
    """
    path = Path(weight_file)
    dtype, shape = _dtype_of(path, weight_info["dtype"]), tuple(weight_info["shape"])
    count = math.prod(shape)
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
        if size < count * dtype.itemsize:
            raise CheckpointError(
                f"Cannot load {str(path)!r}.",
                f"It has {size} bytes; shape {shape} in {dtype} takes {count * dtype.itemsize}.",
                "Offload the model again into an empty folder.",
            )
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        # The mapping is private: changes of the tensor stay in memory.
        return torch.from_file(str(path), shared=False, size=count, dtype=dtype).reshape(shape)
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"Cannot load {str(path)!r}.", f"It cannot be read: {error}.", "Offload the model again."
        ) from error


def _dtype_of(path: Path, name: str) -> torch.dtype:
    try:
        return torch_dtype(name)
    except SettingError as error:
        raise CheckpointError(
            f"Cannot load {str(path)!r}.", f"torch has no dtype {name!r}.", "Offload the model again."
        ) from error


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, Tensor]) -> None:
    """Write every weight of a state dict into a folder, with its index.

    Args:
        save_dir: the folder, created if it is missing.
        state_dict: weights by name.

    Raises:
        CheckpointError: a weight has no data, or the disk rejects the write.

    Example:
        offload_state_dict("offloaded", model.state_dict())
        weights = OffloadedWeightsLoader(save_folder="offloaded")
    """
    index: dict[str, dict[str, Any]] = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Weights by name, wherever they are: in memory, in an offload folder, or in safetensors files.

    Each weight is mapped once, in the form of its file; several threads may read it. If the index specifies another
    dtype, or the weight goes to another device, it is converted at each access and not cached: weights that are on the
    disk because of lack of memory must not accumulate in memory.

    Args:
        state_dict: weights in memory; they have priority over those on the disk.
        save_folder: an offload folder with its index.
        index: used in place of the folder's own index; its entries may name safetensors files.
        device: device for weights from safetensors files in the index.
        stored: weights in files that a load has opened; they need no index.

    Raises:
        SettingError: the call names no source.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: Any = None,
        stored: Mapping[str, StoredWeight] | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise SettingError(
                "Cannot create an OffloadedWeightsLoader.",
                "The call has neither state_dict, save_folder nor index.",
                "Pass at least one of them.",
            )
        # A copy of the dictionary: pinned memory may replace its weights.
        self.state_dict: Mapping[str, Tensor] = dict(state_dict) if type(state_dict) is dict else state_dict or {}
        self.save_folder = save_folder
        self.index: Mapping[str, Mapping[str, Any]] = (
            index if index is not None else {} if save_folder is None else read_offload_index(save_folder)
        )
        self.device = device
        self.stored = stored or {}
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.stored, *self.index]))
        self._mapped: dict[str, Tensor] = {}
        self._files: dict[str, WeightFile] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_mapped": {}, "_files": {}, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        if key in self.stored:
            return self.stored[key].mapped()
        entry = self.index[key]
        if key in self._mapped:
            return self._mapped[key]
        with self._lock:
            weight = self._map(key, entry)
        converted = weight
        if (place := entry.get("safetensors_file")) is not None:
            dtype = _dtype_of(Path(place), entry["dtype"]) if entry.get("dtype") else weight.dtype
            converted = weight.to(device=self.device, dtype=dtype)
        if converted is weight:
            # Only after that: an allocation next to freed memory would prevent the allocator from reusing all of it.
            return self._mapped.setdefault(key, weight)
        return converted

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def _map(self, key: str, entry: Mapping[str, Any]) -> Tensor:
        place = entry.get("safetensors_file")
        if place is None:
            if self.save_folder is None:
                raise CheckpointError(
                    f"Cannot load {key!r}.", "The folder of its file is not set.", "Pass save_folder=."
                )
            return load_offloaded_weight(weight_file(self.save_folder, key), entry)
        if place not in self._files:
            self._files[place] = WeightFile(Path(place))
        weight: Tensor = self._files[place].get(str(entry.get("weight_name", key)))
        return weight


class PrefixedDataset(Mapping[str, Any]):
    """A view of a mapping with a prefix: looking up `key` looks up `prefix + key`."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return len(self.dataset)


def place_in_memory(weights: Mapping[str, Any], name: str) -> tuple[dict[str, Tensor], str] | None:
    """The dictionary and key of a weight that stays in host memory, if the dictionary belongs to the loader."""
    if isinstance(weights, PrefixedDataset):
        return place_in_memory(weights.dataset, f"{weights.prefix}{name}")
    own = weights.state_dict if isinstance(weights, OffloadedWeightsLoader) else None
    return (own, name) if type(own) is dict and name in own else None


INDEX_NAME: Final = "index.json"
_MOST_DIMENSIONS: Final = 64
_WRITTEN: Final = record({"dtype": text(), "shape": list_of(integer(), _MOST_DIMENSIONS)})
_LEFT: Final = record({"safetensors_file": text()}, {"weight_name": text(), "dtype": text()})


def weight_file(folder: str | os.PathLike[str], name: str) -> Path:
    """The file of an offloaded weight.

    Raises:
        CheckpointError: the name refers to a path outside the folder.
    """
    return Path(_path_of(folder, name))


def _path_of(folder: str | os.PathLike[str], name: str) -> str:
    try:
        if not name or "/" in name:
            raise ValueError(f"{quoted(name)} is not the name of a file in the folder")
        return path_inside(folder, f"{name}.dat", links_out=True)
    except ValueError as error:
        raise _bad(Path(folder), f"The name of a weight is not valid: {error}.") from error


def save_offload_index(index: Mapping[str, Mapping[str, Any]], offload_folder: str | os.PathLike[str]) -> None:
    """Write an index, merged with an existing one; an empty index is not written.

    Args:
        index: the entries of weights by name, as `offload_weight` wrote them.
        offload_folder: the folder of the weights.

    Raises:
        CheckpointError: the existing index cannot be read, or the disk rejects the write.
    """
    if not index:
        return
    path = Path(offload_folder) / INDEX_NAME
    merged = {**(read_offload_index(offload_folder) if path.is_file() else {}), **index}
    text = json.dumps(merged, indent=2)
    _replace(path, text.encode(), f"Cannot write {str(path)!r} ({convert_bytes(len(text))}).")


def read_offload_index(folder: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Read and check an index: weight name to `{"dtype", "shape"}`, or to `{"safetensors_file", ...}`.

    Raises:
        CheckpointError: it cannot be read, or an entry has neither form.
    """
    path = Path(folder) / INDEX_NAME
    try:
        document: dict[str, dict[str, Any]] = read_json(path, dict_of(_entry))
    except OSError as error:
        raise _bad(path, f"It cannot be read: {error}.") from error
    except ValueError as error:
        raise _bad(path, f"It is damaged. {error}") from error
    for name in document:
        _path_of(folder, name)
    return document


def _entry(value: Any) -> str:
    """Shape of an entry of either kind."""
    return (_LEFT if isinstance(value, dict) and "safetensors_file" in value else _WRITTEN)(value)


def _bad(path: Path, obstacle: str) -> CheckpointError:
    return CheckpointError(
        f"Cannot read the offloaded weights listed in {str(path)!r}.",
        printable(obstacle),
        "Offload the model again into an empty folder.",
    )
