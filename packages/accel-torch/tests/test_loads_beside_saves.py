"""A load reads one save, also while another run saves over the same name, on every process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_plugins.checkpoint.locks import FolderLock
from accel_state.errors import CheckpointError
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import Accelerator, ProjectConfiguration

pytestmark = pytest.mark.usefixtures("preloaded_python")

SAVES = """
import itertools, sys
import torch
import torch
from torch import nn
from accel_torch import Accelerator, ProjectConfiguration

class Count:
    value = 0
    def state_dict(self):
        return {"value": self.value}
    def load_state_dict(self, state):
        self.value = state["value"]

accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(fsync=False))
model = accelerator.prepare(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
count = Count()
accelerator.register_for_checkpointing(count)
for count.value in itertools.count():
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(count.value)
    accelerator.save_state(sys.argv[1])
    print(count.value, flush=True)
"""


class Count:
    value = -1

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@pytest.fixture
def saving(tmp_path: Path) -> Iterator[Path]:
    """A folder that another run saves over all the time."""
    target = tmp_path / "last"
    run = subprocess.Popen([sys.executable, "-c", SAVES, str(target)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "0\n"
    yield target
    assert run.poll() is None
    run.kill()
    run.communicate()


def load_often(folder: str, times: int) -> list[set[float]]:
    """The values of all that each load restored."""
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(fsync=False))
    model: Any = accelerator.prepare(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    count = Count()
    accelerator.register_for_checkpointing(count)
    values = []
    for _ in range(times):
        accelerator.load_state(folder, allow_missing=("random_states",))
        found = {float(value) for parameter in model.parameters() for value in parameter.detach().unique()}
        values.append(found | {float(count.value)})
    return values


def test_a_load_beside_a_run_that_saves_reads_one_save(saving: Path) -> None:
    with fresh():
        values = load_often(str(saving), 40)
    assert [len(value) for value in values] == [1] * 40
    assert len({value for one in values for value in one}) > 1


def test_all_processes_read_the_same_save(two: Processes, saving: Path) -> None:
    first, second = two.run(load_often, str(saving), 20)
    assert first == second
    assert [len(value) for value in first] == [1] * 20


def test_errors_and_hooks_name_the_folder_and_not_how_it_is_open(tmp_path: Path) -> None:
    with fresh():
        accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(fsync=False))
        accelerator.prepare(nn.Linear(2, 2))
        accelerator.save_state(str(tmp_path / "a"))
    with fresh():
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(nn.Linear(3, 3))
        seen = []
        accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(folder))
        with pytest.raises(CheckpointError) as caught:
            accelerator.load_state(str(tmp_path / "a"))
    assert str(tmp_path / "a") in str(caught.value)
    assert "/proc/" not in str(caught.value)
    assert seen == [str(tmp_path / "a")]


def test_a_checkpoint_that_is_replaced_where_nothing_can_be_locked_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refused(file: int, operation: int) -> None:
        raise OSError("no locks available")

    with fresh():
        accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(fsync=False))
        accelerator.prepare(nn.Linear(2, 2))
        accelerator.save_state(str(tmp_path / "a"))
        monkeypatch.setattr(fcntl, "flock", refused)
        accelerator.register_load_state_pre_hook(lambda models, folder: save_again())

        def save_again() -> None:
            from accel_plugins.checkpoint.commit import staging

            with staging(tmp_path / "a") as folder:
                (folder / "model.safetensors").write_bytes(b"")

        with pytest.raises(CheckpointError):
            accelerator.load_state(str(tmp_path / "a"))


def test_a_checkpoint_that_was_replaced_is_loaded_again_where_an_open_folder_has_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on macOS: files are read by the name, which leads to another save meanwhile."""
    with fresh():
        accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(fsync=False))
        model: Any = accelerator.prepare(nn.Linear(2, 2))
        for name, value in (("last", 1.0), ("next", 2.0)):
            with torch.no_grad():
                model.weight.fill_(value)
            accelerator.save_state(str(tmp_path / name))
        monkeypatch.setattr(FolderLock, "path", property(lambda lock: lock.folder))
        seen = []

        def replace(models: object, folder: str) -> None:
            seen.append(folder)
            if len(seen) == 1:
                (tmp_path / "last").rename(tmp_path / "before")
                (tmp_path / "next").rename(tmp_path / "last")

        accelerator.register_load_state_pre_hook(replace)
        assert accelerator.load_state(str(tmp_path / "last")) == str(tmp_path / "last")
    assert seen == [str(tmp_path / "last")] * 2
    assert model.weight.unique().tolist() == [2.0]
    assert "is loaded again" in caplog.text
