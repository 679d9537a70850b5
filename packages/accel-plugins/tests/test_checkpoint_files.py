"""Files of a checkpoint: what is written early to the disk, and shards that are flushed once."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_plugins.checkpoint import files
from accel_plugins.checkpoint.files import FlushedWhileWritten
from accel_plugins.checkpoint.shards import SavePlans, read_whole, write_shards


def test_the_disk_is_given_each_part_of_a_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(files, "_WRITEBACK_BYTES", 1000)
    monkeypatch.setattr(files, "_sync_file_range", lambda: lambda file, begin, length, _: given.append((begin, length)))
    parts = [os.urandom(size) for size in (10, 700, 400, 0, 5000, 3)]
    with FlushedWhileWritten(tmp_path / "a", "wb") as raw, io.BufferedWriter(raw, 64) as file:
        for part in parts:
            file.write(part)
    assert (tmp_path / "a").read_bytes() == b"".join(parts)
    ends = [begin + length for begin, length in given]
    assert [begin for begin, _ in given] == [0, *ends[:-1]]
    assert all(length >= 1000 for _, length in given)
    assert 6113 - 1000 < ends[-1] <= 6113


def test_a_system_that_begins_with_no_file_early_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_WRITEBACK_BYTES", 1)
    monkeypatch.setattr(files, "_sync_file_range", lambda: None)
    with FlushedWhileWritten(tmp_path / "a", "wb") as file:
        assert file.write(b"weights") == 7
    assert (tmp_path / "a").read_bytes() == b"weights"


@pytest.mark.usefixtures("cpu_state")
@pytest.mark.skipif(not Path("/proc/version").is_file(), reason="needs a file system that flushes nothing")
def test_a_file_system_that_cannot_flush_folders_is_written_to() -> None:
    # Linux answers here what it answers for folders of SMB shares.
    with pytest.raises(OSError, match="Invalid argument"):
        files.fsync_path(Path("/proc/version"))
    files.fsync_path(Path("/proc"))


def test_shards_are_written_without_waiting_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("the commit waits for the disk")

    monkeypatch.setattr(os, "fsync", refused)
    state = {"weight": torch.arange(10_000_000.0), "lr": 0.1}
    write_shards({"model": state}, tmp_path / "shards", SavePlans())
    found = read_whole(tmp_path / "shards")["model"]
    assert torch.equal(found["weight"], state["weight"])
    assert found["lr"] == 0.1
