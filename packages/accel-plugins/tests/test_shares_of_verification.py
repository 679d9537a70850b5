"""Which process verifies which file of a checkpoint before a load, and what counts as damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from accel_plugins.checkpoint import manifest as manifests
from accel_plugins.checkpoint.manifest import CheckpointManifest, FileRecord, damage_in, record_of
from accel_state.current import Process
from accel_state.topology import Topology
from accel_state.transport.base import LocalTransport
from accel_testing.fresh import fresh

SIZES = {"optimizer.bin": 600, "model.safetensors": 300, "scheduler.bin": 200, "random_states_0.pkl": 9}
SIZES |= {"random_states_1.pkl": 9, "optimizer_0/__1_0.distcp": 500}


class _OneOfTwo(LocalTransport):
    world_size = 2


@pytest.mark.parametrize("size", [0, 1, (1 << 18) - 1, (1 << 20) + 7])
def test_the_hash_is_that_of_the_bytes(tmp_path: Path, size: int) -> None:
    content = bytes(index % 251 for index in range(size))
    (tmp_path / "a").write_bytes(content)
    assert record_of(tmp_path / "a") == FileRecord(size, xxhash.xxh3_128(content).hexdigest())


def verified_by(process: Process, rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    transport = _OneOfTwo(process.device)
    transport.rank = rank
    seen: set[str] = set()
    monkeypatch.setattr(manifests, "_damage_of_file", lambda folder, name, record, hashes: seen.add(name))
    topology = Topology(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
    manifest = CheckpointManifest(
        {name: FileRecord(size, "0" * 32) for name, size in SIZES.items()}, {"world_size": world_size}
    )
    assert damage_in(Path(), manifest, process._replace(transport=transport, topology=topology)) == []
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_processes_share_all_files(monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
    with fresh():
        from accel_state import current

        process: Process = current.process_or_start()
        first, second = (verified_by(process, rank, world_size, monkeypatch) for rank in (0, 1))
    assert first | second == set(SIZES)
    assert not first & second
    if world_size == 2:
        # Each verifies what it alone reads, and an equal part of the rest.
        assert first == {"random_states_0.pkl", "optimizer.bin"}


def test_what_leads_out_of_the_folder_or_is_missing_is_damage(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("secret")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    listed = {name: FileRecord(6, "0" * 32) for name in ("../outside", "missing")}
    with fresh():
        from accel_state import current

        process: Process = current.process_or_start()
        found = damage_in(folder, CheckpointManifest(listed), process)
    assert len(found) == 2
    assert any("not the name of a file" in sentence for sentence in found)
    assert "missing is missing." in found
