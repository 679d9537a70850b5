"""The `.metadata` of folders of shards, which torch reads with pickle: here it may use only the classes that describe
tensors and their places.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from accel_ops.restricted_pickle import load_restricted
from accel_state.errors import CheckpointError
from accel_state.untrusted import open_regular

__all__ = ("names_in_metadata", "read_metadata")

_METADATA_MODULE: Final = "torch.distributed.checkpoint.metadata"
_FILES_MODULE: Final = "torch.distributed.checkpoint.filesystem"
_PLANS_MODULE: Final = "torch.distributed.checkpoint.planner"

_ALLOWED_CLASSES: Final = {
    **dict.fromkeys(
        (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        ),
        _METADATA_MODULE,
    ),
    **dict.fromkeys(("_StorageInfo", "_StoragePrefix"), _FILES_MODULE),
    **dict.fromkeys(("SavePlan", "WriteItem", "WriteItemType", "BytesIOWriteData", "TensorWriteData"), _PLANS_MODULE),
}


class _Properties(TensorProperties):
    """The properties of a tensor as any torch writes them."""

    def __setstate__(self, state: Any) -> None:
        # torch 2.15 added the strides, and reads files of older versions, which cannot read its six properties.
        if len(state) > len(dataclasses.fields(TensorProperties)):
            raise ValueError("a newer torch wrote it: install torch 2.15 or newer")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__class__ = TensorProperties  # type: ignore[assignment]


@cache
def names_in_metadata() -> Mapping[tuple[str, str], Any]:
    """What descriptions of tensors consist of."""
    own = {(module, name): getattr(import_module(module), name) for name, module in _ALLOWED_CLASSES.items()}
    dtypes = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    # The second is that of Python 3.13.
    paths = {(module, "PosixPath"): PurePosixPath for module in ("pathlib", "pathlib._local")}
    windows = {(module, "WindowsPath"): PurePosixPath for module in ("pathlib", "pathlib._local")}
    plain = {("collections", "OrderedDict"): OrderedDict, ("torch", "Size"): torch.Size, ("builtins", "set"): set}
    own[_METADATA_MODULE, "TensorProperties"] = _Properties
    return {**own, **dtypes, **paths, **windows, **plain, ("torch.serialization", "_get_layout"): _layout}


def _layout(name: str) -> torch.layout:
    layout = getattr(torch, name.removeprefix("torch."))
    if not isinstance(layout, torch.layout):
        raise ValueError(f"{name} is not a layout")
    return layout


def _demand_description(described: Any) -> None:
    """Raise unless everything that describes tensors has all its fields."""
    _demand_whole(described, Metadata)
    for one in described.state_dict_metadata.values():
        _demand_whole(one, (TensorStorageMetadata, BytesStorageMetadata))
        if isinstance(one, TensorStorageMetadata):
            _demand_whole(one.properties, TensorProperties)
            for chunk in one.chunks:
                _demand_whole(chunk, ChunkStorageMetadata)
    for index, place in (described.storage_data or {}).items():
        _demand_whole(index, MetadataIndex)
        _demand_whole(place, _StorageInfo)


def _demand_whole(item: Any, kind: Any) -> None:
    if not isinstance(item, kind) or not all(hasattr(item, field.name) for field in dataclasses.fields(item)):
        raise ValueError("it is not a description of tensors")


def read_metadata(path: Path) -> Metadata:
    """Read a `.metadata` file that contains only descriptions of tensors.

    Args:
        path: the file.

    Raises:
        CheckpointError: the file is missing or damaged, or contains anything else.
    """
    try:
        with BufferedReader(open_regular(path)) as file:
            content = file.read()
        described: Metadata = load_restricted(content, names_in_metadata())
        _demand_description(described)
        for place in (described.storage_data or {}).values():
            if place.relative_path in ("", ".", "..") or set(place.relative_path) & set("/\\:\0"):
                raise ValueError(f"it names the file {place.relative_path!r}, which leads out of the folder")
            if getattr(place, "transform_descriptors", None):
                raise ValueError("its files are compressed, or changed by an extension")
        return described
    except FileNotFoundError:
        raise CheckpointError(
            f"Cannot load the shards in {path.parent}.",
            f"{path.name} is not there.",
            "The folder is incomplete: load an older checkpoint.",
        ) from None
    except Exception as error:  # a damaged pickle can make its reader raise any error
        raise CheckpointError(
            f"Cannot load the shards in {path.parent}.",
            f"{path.name} is damaged or contains more than descriptions of tensors: {error}",
            "Load an older checkpoint that you trust.",
        ) from error
