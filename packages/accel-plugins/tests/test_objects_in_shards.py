"""Values among the tensors of shards that an engine reads by itself."""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

from accel_plugins.checkpoint.shards import check_objects
from accel_state.errors import CheckpointError


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = str(trace)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.trace,)


def written(folder: Path, value: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        state = {"weight": torch.ones(4), "generators": value}
        checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_plain_values_pass(tmp_path: Path) -> None:
    states = {"states": torch.ones(3, dtype=torch.uint8), "seed": 3, "of a layer": io.BytesIO(b"bytes")}
    check_objects(written(tmp_path / "shards", states))


def test_a_value_that_runs_code_is_refused_before_it_does(tmp_path: Path) -> None:
    folder, trace = written(tmp_path / "shards", Evil(tmp_path / "trace")), tmp_path / "trace"
    with pytest.raises(CheckpointError, match=r"(?s)'generators'.*more than plain data"):
        check_objects(folder)
    assert not trace.exists()


@pytest.mark.parametrize("harm", ["missing", "cut"])
def test_a_damaged_shard_is_refused(tmp_path: Path, harm: str) -> None:
    folder = written(tmp_path / "shards", list(range(1000)))
    for shard in folder.glob("*.distcp"):
        content = shard.read_bytes()
        shard.unlink()
        if harm == "cut":
            shard.write_bytes(content[:100])
    with pytest.raises(CheckpointError, match="'generators'"):
        check_objects(folder)


def test_a_file_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "shards", [1, 2])
    (shard,) = folder.glob("*.distcp")
    metadata = folder / ".metadata"
    name, outside = shard.name.encode(), b"../" + shard.name[3:].encode()
    shard.rename(tmp_path / shard.name[3:])
    metadata.write_bytes(metadata.read_bytes().replace(name, outside))
    with pytest.raises(CheckpointError, match="out of the folder"):
        check_objects(folder)
