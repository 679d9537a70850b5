"""Contents are compared with their hashes before anything is loaded, unless the setting says sizes alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_plugins.checkpoint import manifest as manifests
from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_plugins.checkpoint.manifest import read_manifest
from accel_state.errors import CheckpointError
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration


class Session:
    """A model, an optimizer that has stepped, and a project."""

    def __init__(self, project: Path, sharded: bool = False, **options: Any) -> None:
        torch.manual_seed(1)
        configuration = ProjectConfiguration(
            str(project), automatic_checkpoint_naming=True, fsync=False, deadline=60.0, **options
        )
        plugin = None
        if sharded:
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
        self.accelerator = Accelerator(cpu=True, project_config=configuration, fsdp_plugin=plugin)
        model = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 300), nn.Linear(300, 1))
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.Adam(model.parameters()))
        self.step()

    def step(self) -> None:
        self.accelerator.backward(self.model(torch.ones(2, 4)).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> list[torch.Tensor]:
        own = [parameter.detach() for parameter in self.model.parameters()]
        moments = [value for state in self.optimizer.state_dict()["state"].values() for value in state.values()]
        local = [value.to_local() if hasattr(value, "to_local") else value for value in (*own, *moments)]
        return [value.clone() for value in local]


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl"])
def test_a_flipped_byte_is_refused_before_anything_is_changed(tmp_path: Path, name: str) -> None:
    with fresh():
        session = Session(tmp_path)
        folder = Path(session.accelerator.save_state())
        flip(folder / name, (folder / name).stat().st_size - 200)
        session.step()
        before = session.state
        with pytest.raises(CheckpointError, match=f"{name} has changed since"):
            session.accelerator.load_state(str(folder))
        with pytest.raises(CheckpointError, match=f"checkpoint_0: {name} has changed since"):
            session.accelerator.load_state()
        assert equal(session.state, before)


def test_automatic_naming_goes_back_to_an_older_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fresh():
        session = Session(tmp_path)
        session.accelerator.save_state()
        saved = session.state
        for _ in range(2):
            session.step()
            folder = Path(session.accelerator.save_state())
            flip(folder / "model.safetensors", 5000)
        with caplog.at_level(logging.WARNING):
            assert session.accelerator.load_state() == str(tmp_path / "checkpoints" / "checkpoint_0")
        assert equal(session.state, saved)
        assert "Skipped checkpoint_2: model.safetensors has changed since" in caplog.text
        assert "Skipped checkpoint_1: model.safetensors has changed since" in caplog.text


def test_sizes_alone_are_compared_where_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh():
        session = Session(tmp_path, verify="sizes")
        folder = session.accelerator.save_state()
        monkeypatch.setattr(manifests, "record_of", lambda _: pytest.fail("A file was hashed."))
        assert session.accelerator.load_state() == folder


@pytest.mark.parametrize("damaged", [False, True])
def test_manifests_of_older_releases_are_read_and_verified(tmp_path: Path, damaged: bool) -> None:
    with fresh():
        session = Session(tmp_path)
        folder = Path(session.accelerator.save_state())
        document = json.loads((folder / MANIFEST_NAME).read_text())
        del document["xxh3_128"]
        for entry in document["files"].values():
            entry["ranges"] = {str(entry["size"]): "0" * 16}
        (folder / MANIFEST_NAME).write_text(json.dumps(document))
        if not damaged:
            assert session.accelerator.load_state() == str(folder)
            return
        flip(folder / "model.safetensors", 5000)
        with pytest.raises(CheckpointError, match="has changed since"):
            session.accelerator.load_state()


def load_on_two(project: str, sharded: bool, damage: str | None) -> tuple[str, bool, int]:
    session = Session(Path(project), sharded)
    accelerator = session.accelerator
    accelerator.save_state()
    saved = session.state
    session.step()
    folder = Path(accelerator.save_state())
    if damage is not None and accelerator.is_main_process:
        [found] = folder.glob(damage)
        flip(found, found.stat().st_size // 2)
    accelerator.wait_for_everyone()
    session.step()
    hashed: list[str] = []
    real = manifests.record_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifests, "record_of", lambda path: hashed.append(path.name) or real(path))
        loaded = accelerator.load_state()
    accelerator.wait_for_everyone()
    return Path(str(loaded)).name, equal(session.state, saved), len(hashed)


@pytest.mark.parametrize(
    ("sharded", "damage"),
    [
        (False, "optimizer.bin"),
        (False, "random_states_1.pkl"),
        (True, "pytorch_model_fsdp_0/__0_*.distcp"),
        (True, "optimizer_0/__1_*.distcp"),
    ],
)
def test_what_one_process_finds_damaged_no_process_loads(
    two: Processes, tmp_path: Path, sharded: bool, damage: str
) -> None:
    found = two.run(load_on_two, str(tmp_path), sharded, damage)
    assert [(name, same) for name, same, _ in found] == [("checkpoint_0", True)] * 2


@pytest.mark.parametrize("sharded", [False, True])
def test_processes_share_the_work(two: Processes, tmp_path: Path, sharded: bool) -> None:
    (name, _, first), (_, _, second) = two.run(load_on_two, str(tmp_path), sharded, None)
    assert name == "checkpoint_1"
    manifest = read_manifest(tmp_path / "checkpoints" / name)
    assert manifest is not None
    assert first + second == len(manifest.files)
    assert min(first, second) > 0
