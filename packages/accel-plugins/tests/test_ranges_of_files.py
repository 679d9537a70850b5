"""Ranges cover a file without a gap, end where tensors end, and have the hashes of their bytes."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from accel_bigmodel.weight_files.names import tensor_ranges
from accel_plugins.checkpoint import manifest as manifests
from accel_plugins.checkpoint.manifest import (
    CheckpointManifest,
    FileRecord,
    damage_in,
    hash_of_range,
    place_of,
    range_ends,
    record_of,
)
from accel_state.current import Process
from accel_testing.fresh import fresh

MIB = 1 << 20


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    tensors = {f"small.{index}": torch.randn(100) for index in range(5)}
    save_file({"large": torch.randn(5 * MIB), "middle": torch.randn(100_000), **tensors}, path)
    return path


def test_ranges_end_with_tensors(weights: Path) -> None:
    ends = range_ends(weights, weights.stat().st_size)
    ranges = tensor_ranges(weights)
    assert ends[0] == min(begin for begin, _ in ranges.values())
    assert ends[-1] == weights.stat().st_size
    assert {ranges["large"][1], ranges["middle"][1]} <= set(ends)
    assert max(end - begin for begin, end in pairwise([0, *ends])) <= 16 * MIB
    # Those of a few hundred bytes share one.
    assert len(ends) == 1 + 2 + 1 + 1


@pytest.mark.parametrize("size", [0, 1, 5 * MIB, 16 * MIB, 33 * MIB + 7])
@pytest.mark.parametrize("name", ["optimizer.bin", "no.safetensors"])
def test_other_files_are_cut_into_pieces(tmp_path: Path, size: int, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(bytes(size))
    assert range_ends(path, size) == [*range(16 * MIB, size, 16 * MIB), *([size] if size else [])]
    assert record_of(path).size == size


def refused(thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


@pytest.mark.parametrize("way", ["mapped", "read", "mapped without threads"])
def test_hashes_are_those_of_the_bytes(weights: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "read":
        monkeypatch.setattr(manifests, "_advise", lambda: None)
    if way == "mapped without threads":
        monkeypatch.setattr(threading.Thread, "start", refused)
    record, content = record_of(weights), weights.read_bytes()
    assert record.xxh3_128 == xxhash.xxh3_128(content).hexdigest()
    for begin, end in pairwise([0, *(record.ranges or ())]):
        expected = xxhash.xxh3_64(content[begin:end]).hexdigest()
        assert (record.ranges or {})[end] == hash_of_range(weights, begin, end) == expected


def test_pages_that_cannot_be_mapped_are_read(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of(weights)
    begin, end = next(iter(pairwise(record.ranges or ())))
    monkeypatch.setattr(manifests, "_advise", lambda: lambda *_: -1)
    assert hash_of_range(weights, begin, end) == (record.ranges or {})[end]
    # Shorter than it was: the end of a mapping would end the process.
    with open(weights, "rb+") as file:
        file.truncate(begin + 10)
    monkeypatch.undo()
    assert hash_of_range(weights, begin, end) == xxhash.xxh3_64(weights.read_bytes()[begin:]).hexdigest()


def test_the_place_of_damage_has_the_names_of_tensors(weights: Path) -> None:
    ranges = tensor_ranges(weights)
    begin, _ = ranges["large"]
    assert place_of(weights, begin, begin + 16 * MIB).startswith("'large' (bytes")
    smalls = sorted(name for name in ranges if name.startswith("small"))
    place = place_of(weights, ranges[smalls[0]][0], ranges[smalls[-1]][1])
    assert place.startswith("one of 'small.0' to 'small.4' (bytes")
    assert place_of(weights.with_name("absent.bin"), 3, 9) == "the bytes 3 to 9"


def test_what_leads_out_of_the_folder_or_is_missing_is_damage(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("secret")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    listed = {name: FileRecord(6, "0" * 32, {6: "0" * 16}) for name in ("../outside", "missing")}
    with fresh():
        from accel_state import current

        process: Process = current.process_or_start()
        found = damage_in(folder, CheckpointManifest(listed), process)
    assert len(found) == 2
    assert "leads out" in found[0] or "not the name" in found[0]
    assert found[1].startswith("missing cannot be read")
