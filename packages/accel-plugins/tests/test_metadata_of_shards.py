"""Descriptions of shards as several releases of torch write them: with the strides of a tensor, and without."""

from __future__ import annotations

import copyreg
import io
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from accel_plugins.checkpoint.shard_metadata import read_metadata
from accel_state.errors import CheckpointError

WITH_STRIDES = len(fields(TensorProperties)) == 6


class WithState(pickle.Pickler):
    """Writes `TensorProperties` with further properties than the first five."""

    further: tuple[Any, ...] = ()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, TensorProperties):
            state = (*value.__getstate__()[:5], *self.further)  # type: ignore[attr-defined]
            return copyreg.__newobj__, (TensorProperties,), state  # type: ignore[attr-defined]
        return NotImplemented


def written(folder: Path, *further: Any) -> Path:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16, pin_memory=True), torch.Size([4]), [chunk])
    content = io.BytesIO()
    pickler = WithState(content, protocol=2)
    pickler.further = further
    pickler.dump(Metadata({"weight": tensor}))
    path = folder / ".metadata"
    path.write_bytes(content.getvalue())
    return path


def test_metadata_without_strides_is_read(tmp_path: Path) -> None:
    properties = read_metadata(written(tmp_path)).state_dict_metadata["weight"].properties
    assert (properties.dtype, properties.pin_memory) == (torch.bfloat16, True)


@pytest.mark.parametrize("strides", [None, (1,), (3, 1), ()])
def test_metadata_with_strides_is_read_or_names_the_torch_that_reads_it(tmp_path: Path, strides: Any) -> None:
    path = written(tmp_path, strides)
    if WITH_STRIDES:
        assert read_metadata(path).state_dict_metadata["weight"].properties.strides == strides
    else:
        with pytest.raises(CheckpointError, match="a newer torch wrote it"):
            read_metadata(path)


def test_the_file_of_a_shard_is_in_its_folder(tmp_path: Path) -> None:
    for name in ("../other/__0_0.distcp", "/etc/passwd", "..", "a\\b", ""):
        place = _StorageInfo(name, 0, 1)
        described = Metadata({}, storage_data={MetadataIndex("weight"): place})
        (tmp_path / ".metadata").write_bytes(pickle.dumps(described))
        with pytest.raises(CheckpointError, match="leads out of the folder"):
            read_metadata(tmp_path / ".metadata")


@pytest.mark.parametrize("value", [print, {"a": Path}, pytest, [1, 2]])
def test_other_content_is_refused(tmp_path: Path, value: Any) -> None:
    content = b"\x80\x04cpytest\nraises\n." if value is pytest else pickle.dumps(value)
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="more than descriptions of tensors"):
        read_metadata(tmp_path / ".metadata")
