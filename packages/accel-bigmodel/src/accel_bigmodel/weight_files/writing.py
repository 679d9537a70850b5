"""Writes weights to one file, or to a folder with shards and their index.

Each file is written under another name in the same folder, and renamed when it is complete, so a failed or interrupted
save does not change existing files.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from accel_bigmodel.sizes import convert_bytes, convert_file_size_to_int
from accel_bigmodel.tensors import id_tensor_storage, memory_of
from accel_bigmodel.weight_files.names import (
    SAFE_WEIGHTS_NAME,
    WeightIndex,
    index_name,
    is_safetensors,
    shard_name,
    shard_pattern,
    weights_name,
)
from accel_state.errors import CheckpointError

__all__ = (
    "WeightShards",
    "save_weights",
    "save_weights_file",
    "split_state_dict",
    "stored_names",
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightShards:
    """The files of a save.

    Args:
        files: file name to the names of its weights, in the order of the state dict.
        total_size: bytes of all weights, each tied group counted once.
    """

    files: Mapping[str, tuple[str, ...]]
    total_size: int

    @property
    def index(self) -> WeightIndex | None:
        """The index for the folder of the shards, or None if there is only one file."""
        if len(self.files) == 1:
            return None
        return WeightIndex({name: file for file, names in self.files.items() for name in names}, self.total_size)


def split_state_dict(
    state_dict: Mapping[str, Any], max_shard_size: int | str = "10GB", name: str = SAFE_WEIGHTS_NAME
) -> WeightShards:
    """Split weights, in their order, into files of at most `max_shard_size`; a larger weight gets a separate file.

    Tied weights are in one file. A `.safetensors` file contains only the first name of each tied group, because the
    format does not support two names for one tensor; other formats contain all names.

    Args:
        max_shard_size: bytes, or text such as "5GB".
        name: name of a single file; the names of shards add numbers to it.

    Example:
        >>> import torch
        >>> split_state_dict({"a": torch.zeros(250), "b": torch.zeros(250)}, "1KB").files
        {'model-00001-of-00002.safetensors': ('a',), 'model-00002-of-00002.safetensors': ('b',)}
    """
    limit = convert_file_size_to_int(max_shard_size)
    shards: list[list[str]] = []
    room = total = 0
    for names, size in _groups(state_dict, first_only=is_safetensors(name)):
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1] += names
        room -= size
        total += size
    shards = shards or [[]]
    if len(shards) == 1:
        return WeightShards({name: tuple(shards[0])}, total)
    count = len(shards)
    return WeightShards({shard_name(name, i, count): tuple(names) for i, names in enumerate(shards, 1)}, total)


def stored_names(state_dict: Mapping[str, Any], name: str = SAFE_WEIGHTS_NAME) -> list[str]:
    """The weight names in a file with this name; for safetensors without the second names of tied weights."""
    return [kept for names, _ in _groups(state_dict, first_only=is_safetensors(name)) for kept in names]


def _groups(state_dict: Mapping[str, Any], first_only: bool) -> Iterator[tuple[list[str], int]]:
    """Names that must be in one file, and their bytes; in the order in which each first occurs."""
    groups: dict[Any, tuple[list[str], int]] = {}
    removed: dict[str, str] = {}
    for name, value in state_dict.items():
        is_tensor = isinstance(value, Tensor)
        key = memory_of(value) if is_tensor else name
        names, _ = groups.setdefault(key, ([], value.numel() * value.element_size() if is_tensor else 0))
        if names and first_only:
            removed[name] = names[0]
        else:
            names.append(name)
    if removed:
        _log.warning(
            "Removed shared tensor names, because the file contains these tensors under another name: %s.", removed
        )
    yield from groups.values()


_METADATA: Mapping[str, str] = {"format": "pt"}


def save_weights(
    state_dict: Mapping[str, Any],
    folder: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    metadata: Mapping[str, str] = _METADATA,
    *,
    name: str | None = None,
    fsync: bool = False,
) -> WeightShards:
    """Write weights into a folder, in shards with an index if they are larger than `max_shard_size`.

    Files of an earlier save with the same name (shards, index, single file) are removed after the new files are
    complete, so that a reader never mixes the two. The folder is created.

    Args:
        safe_serialization: write safetensors files; False uses `torch.save`.
        metadata: text for the header of each safetensors file.
        name: file name; `model.safetensors` or `pytorch_model.bin` by default.
        fsync: return only after everything is on the disk, not just in the page cache.

    Raises:
        CheckpointError: a weight has no data (meta device), the format does not support it, or the disk rejects a
            write.

    Example:
        save_weights(model.state_dict(), "checkpoint", max_shard_size="2GB")
    """
    folder = Path(folder)
    name = name or weights_name(safe_serialization)
    shards = split_state_dict(state_dict, max_shard_size, name)
    _check_values(state_dict, folder / name)
    _make_folder(folder)
    for file, names in shards.files.items():
        save_weights_file({key: state_dict[key] for key in names}, folder / file, metadata, fsync=fsync)
    index = shards.index
    if index is not None:
        text = index.text().encode()
        _write(folder / index_name(name), lambda path: path.write_bytes(text), len(text), fsync)
    _remove_stale(folder, name, keep={*shards.files, *([] if index is None else [index_name(name)])})
    if fsync:
        _fsync_folder(folder)
    return shards


def save_weights_file(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] = _METADATA,
    *,
    fsync: bool = False,
) -> None:
    """Write weights into one file; a name ending in `.safetensors` selects that format, any other name `torch.save`.

    Tied weights are written once (safetensors files contain only their first name), and a view is written without the
    rest of its storage.

    Raises:
        CheckpointError: as `save_weights`.
    """
    path = Path(path)
    _check_values(state_dict, path)
    size = sum(value.numel() * value.element_size() for value in state_dict.values() if isinstance(value, Tensor))
    if is_safetensors(path):
        kept = {name: state_dict[name].detach().cpu().contiguous() for name in stored_names(state_dict, path.name)}
        own = _with_own_memory(kept)
        _write(path, lambda target: save_file(own, target, dict(metadata)), size, fsync)
    else:
        own = _with_own_memory(state_dict)
        _write(path, lambda target: torch.save(own, target), size, fsync)


def _check_values(state_dict: Mapping[str, Any], path: Path) -> None:
    """Check before the first write that all weights can be stored."""
    for name, value in state_dict.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise CheckpointError(
                f"Cannot save the weights in {str(path)!r}.",
                f"{name!r} of shape {tuple(value.shape)} is on the meta device and has no data.",
                "Load or initialise the model first, or remove this weight.",
            )
        if is_safetensors(path) and not (isinstance(value, Tensor) and value.layout == torch.strided):
            what = f"{value.layout} tensor" if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(
                f"Cannot save the weights in {str(path)!r}.",
                f"{name!r} is a {what}; safetensors supports only dense tensors.",
                "Pass safe_serialization=False, or remove this weight.",
            )


def _with_own_memory(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The same values, with copies of views of a larger or shared storage; tied names stay tied."""
    result: dict[str, Any] = {}
    owned: dict[tuple[Any, ...], Tensor] = {}
    storages: set[tuple[Any, ...]] = set()
    for name, value in state_dict.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            result[name] = value
            continue
        key = memory_of(value)
        if key not in owned:
            storage = id_tensor_storage(value)
            shares = storage in storages or storage[-1] != value.nbytes
            owned[key] = value.detach().clone(memory_format=torch.contiguous_format) if shares else value.detach()
            storages.add(storage)
        result[name] = owned[key]
    return result


def _write(path: Path, write: Callable[[Path], object], size: int, fsync: bool) -> None:
    """Run `write` on another name in the same folder, then rename the file; if it fails, the new file is removed."""
    beside = path.with_name(f".{path.name}.tmp-{os.urandom(8).hex()}")
    try:
        write(beside)
        if fsync:
            with open(beside, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(beside, path)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"Cannot write {str(path)!r} ({convert_bytes(size)}).",
            f"{type(error).__name__}: {error}",
            "Check the free space and the permissions of the folder; existing files are unchanged.",
        ) from error
    finally:
        beside.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"Cannot save weights into the folder {str(folder)!r}.",
            f"It cannot be created: {error}.",
            "Use the path of a folder, not of a file, where you may write.",
        ) from error


def _remove_stale(folder: Path, name: str, keep: Iterable[str]) -> None:
    shard = shard_pattern(name)
    stale = {file.name for file in folder.iterdir() if shard.fullmatch(file.name)} | {name, index_name(name)}
    for file in sorted(stale.difference(keep)):
        (folder / file).unlink(missing_ok=True)


def _fsync_folder(folder: Path) -> None:
    """Make the renames durable, if the system can open a folder (not Windows) and flush it (not SMB)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
