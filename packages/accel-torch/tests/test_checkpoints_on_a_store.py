"""Checkpoints of an Accelerator that are copied to a store: saved, found again on a new machine, and refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_plugins.checkpoint.files import MANIFEST_NAME
from accel_plugins.checkpoint.manifest import verify
from accel_plugins.checkpoint.remote import RemoteCheckpoints
from accel_plugins.checkpoint.store import FileStore
from accel_state.errors import CheckpointError, Conflict, SettingError
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import Accelerator, ProjectConfiguration

pytestmark = pytest.mark.usefixtures("fresh_state")


def project(folder: Path | str, **options: Any) -> ProjectConfiguration:
    options.setdefault("remote", (Path(folder) / "store").as_uri())
    return ProjectConfiguration(str(Path(folder) / "run"), automatic_checkpoint_naming=True, deadline=60.0, **options)


def accelerator_with_model(folder: Path | str, **options: Any) -> tuple[Accelerator, nn.Module]:
    accelerator = Accelerator(cpu=True, project_config=project(folder, **options))
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, prepared


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def first(model: nn.Module) -> float:
    return float(next(model.parameters()).detach().flatten()[0])


@pytest.mark.parametrize("async_save", [False, True])
def test_a_new_machine_goes_on_from_the_store(tmp_path: Path, async_save: bool) -> None:
    accelerator, model = accelerator_with_model(tmp_path)
    for value in (1.0, 2.0):
        fill(model, value)
        accelerator.save_state(async_save=async_save)
    accelerator.end_training()
    shutil.rmtree(tmp_path / "run")
    with fresh():
        accelerator, model = accelerator_with_model(tmp_path)
        assert accelerator.load_state() == f"{(tmp_path / 'store').as_uri()}/checkpoint_1"
        assert first(model) == 2.0
        assert Path(accelerator.save_state()).name == "checkpoint_2"


def test_the_newer_of_both_places_is_taken(tmp_path: Path) -> None:
    accelerator, model = accelerator_with_model(tmp_path)
    fill(model, 1.0)
    accelerator.save_state()
    accelerator.end_training()
    with fresh():
        accelerator, model = accelerator_with_model(tmp_path, remote=None)
        accelerator.load_state()
        fill(model, 2.0)
        accelerator.save_state()
    with fresh():
        accelerator, model = accelerator_with_model(tmp_path)
        assert accelerator.load_state() == str(tmp_path / "run" / "checkpoints" / "checkpoint_1")
        assert first(model) == 2.0


def test_a_damaged_local_checkpoint_is_taken_from_the_store(tmp_path: Path) -> None:
    accelerator, model = accelerator_with_model(tmp_path)
    fill(model, 3.0)
    accelerator.save_state()
    accelerator.end_training()
    (tmp_path / "run" / "checkpoints" / "checkpoint_0" / "model.safetensors").write_bytes(b"")
    with fresh():
        accelerator, model = accelerator_with_model(tmp_path)
        assert str(accelerator.load_state()).startswith("file://")
        assert first(model) == 3.0


def test_a_checkpoint_is_loaded_by_its_url_and_leaves_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    accelerator, model = accelerator_with_model(tmp_path)
    fill(model, 4.0)
    accelerator.save_state()
    accelerator.end_training()
    fill(model, 0.0)
    url = f"{(tmp_path / 'store').as_uri()}/checkpoint_0"
    assert accelerator.load_state(url) == url
    assert first(model) == 4.0
    assert list((tmp_path / "temporary").glob("accel-*")) == []
    missing = f"{(tmp_path / 'store').as_uri()}/checkpoint_9"
    assert accelerator.load_state(missing, missing_ok=True) is None
    with pytest.raises(CheckpointError, match="no complete checkpoint of that name"):
        accelerator.load_state(missing)


def test_training_goes_on_when_the_store_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, _ = accelerator_with_model(tmp_path)

    def refuse(self: FileStore, name: str, source: Path) -> None:
        raise OSError("no route to the store")

    with monkeypatch.context() as patched:
        patched.setattr(FileStore, "write", refuse)
        accelerator.save_state()
        assert accelerator.session.uploader is not None
        accelerator.session.uploader.wait()
    assert "no route to the store" in caplog.text
    accelerator.save_state()
    accelerator.end_training()
    remote = RemoteCheckpoints.at((tmp_path / "store").as_uri())
    assert [one.name for one in remote.committed()] == ["checkpoint_0", "checkpoint_1"]


def test_the_limit_holds_on_the_store_too(tmp_path: Path) -> None:
    accelerator, _ = accelerator_with_model(tmp_path, total_limit=1)
    for _ in range(3):
        accelerator.save_state()
    accelerator.end_training()
    remote = RemoteCheckpoints.at((tmp_path / "store").as_uri())
    assert [one.name for one in remote.committed()] == ["checkpoint_2"]


def test_a_store_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(CheckpointError, match="Cannot keep checkpoints in file://"):
        accelerator_with_model(tmp_path)


def test_a_store_in_the_folder_of_the_local_checkpoints_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run", target_is_directory=True)
    for place in (tmp_path / "run" / "checkpoints", tmp_path / "link" / "checkpoints"):
        with fresh(), pytest.raises(Conflict, match="the store would each delete files of the other"):
            accelerator_with_model(tmp_path, remote=place.as_uri())
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("name", ["store/a", "store", "."])
def test_a_checkpoint_in_the_folder_of_the_store_is_refused_and_nothing_is_lost(tmp_path: Path, name: str) -> None:
    place = tmp_path / "store"
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(str(tmp_path / "run"), remote=place.as_uri(), deadline=60.0)
    )
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(str(tmp_path / "run" / "a"))
    accelerator.end_training()
    before = sorted(path for path in place.rglob("*") if path.is_file())
    with pytest.raises(Conflict, match="the store would each delete files of the other"):
        accelerator.save_state(str(tmp_path / name))
    assert sorted(path for path in place.rglob("*") if path.is_file()) == before != []
    assert verify(tmp_path / "run" / "a", hashes=True).good


def test_a_checkpoint_of_a_newer_schema_is_named_and_stays(tmp_path: Path) -> None:
    accelerator, model = accelerator_with_model(tmp_path, remote=None)
    for value in (1.0, 2.0):
        fill(model, value)
        newest = Path(accelerator.save_state())
    manifest = newest / MANIFEST_NAME
    newer = manifest.read_text(encoding="utf-8").replace('"format": 1', '"format": 2')
    manifest.write_text(newer, encoding="utf-8")
    with pytest.raises(CheckpointError, match="format 2; this release supports formats up to 1"):
        accelerator.load_state(str(newest))
    assert (first(model), manifest.read_text(encoding="utf-8")) == (2.0, newer)
    assert accelerator.load_state() == str(newest.with_name("checkpoint_0"))
    assert first(model) == 1.0
    assert Path(accelerator.save_state()).name == "checkpoint_2"
    assert manifest.read_text(encoding="utf-8") == newer


@pytest.mark.parametrize("remote", ["bucket/run", 3])
def test_a_remote_that_is_not_a_url_is_refused(remote: Any) -> None:
    with pytest.raises(SettingError, match="a URL"):
        ProjectConfiguration(remote=remote)


def save_and_load(folder: str) -> tuple[str | None, float, int]:
    accelerator, model = accelerator_with_model(folder)
    fill(accelerator.unwrap_model(model), 5.0)
    accelerator.save_state(async_save=True)
    accelerator.end_training()
    if accelerator.is_main_process:
        shutil.rmtree(Path(folder) / "run")
    accelerator.wait_for_everyone()
    fill(accelerator.unwrap_model(model), 0.0)
    loaded = accelerator.load_state()
    return loaded, first(model), len(list((Path(folder) / "store").rglob("random_states_*")))


def test_two_processes_copy_one_checkpoint_and_load_it(two: Processes, tmp_path: Path) -> None:
    url = f"{(tmp_path / 'store').as_uri()}/checkpoint_0"
    assert two.run(save_and_load, str(tmp_path)) == [(url, 5.0, 2)] * 2


def refused_at_the_start(folder: str) -> str:
    try:
        accelerator_with_model(folder)
    except CheckpointError as error:
        return str(error)
    return "made"


def test_every_process_refuses_a_store_that_the_first_cannot_use(two: Processes, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    assert all("Cannot keep checkpoints in file://" in told for told in two.run(refused_at_the_start, str(tmp_path)))
