"""What fails on one process while a checkpoint is saved or loaded fails on all, at once and with its reason."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_testing.processes import Processes
from accel_torch import Accelerator
from accel_torch.options import ProjectConfiguration

DEADLINE = 80.0


def accelerator(**project: Any) -> Any:
    made = Accelerator(cpu=True, project_config=ProjectConfiguration(deadline=DEADLINE, fsync=False, **project))
    return made, made.prepare(torch.nn.Linear(2, 2))


def told(call: Callable[[], object]) -> str:
    """The error of a call, which must not have waited for others that never come."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        assert time.monotonic() - began < DEADLINE
        return f"{type(error).__name__}: {error}"
    return "no error"


def save_where_nothing_can_be_written(folder: Path, refusing: int, automatic: bool) -> tuple[str, str]:
    one, _model = accelerator()
    place = folder
    if one.process_index == refusing:
        # A file refuses root too, as a read-only mount does.
        place = folder / "file"
        place.touch()
    if automatic:
        one.project_configuration.automatic_checkpoint_naming = True
        one.project_configuration.project_dir = str(place)
    first = told(lambda: one.save_state(None if automatic else str(place / "run" / "saved")))
    one.project_configuration.automatic_checkpoint_naming = False
    return first, told(lambda: one.save_state(str(folder / "good")))


@pytest.mark.parametrize("automatic", [False, True], ids=["named", "automatic naming"])
def test_a_disk_that_refuses_on_rank_0(two: Processes, tmp_path: Path, automatic: bool) -> None:
    for first, second in two.run(save_where_nothing_can_be_written, tmp_path, 0, automatic):
        assert "FileExistsError" in first
        assert second == "no error"
    assert (tmp_path / "good" / "model.safetensors").exists()


def load_copies(folder: Path, automatic: bool, damaged: int) -> tuple[str, str]:
    one, _model = accelerator()
    good = folder / "checkpoints" / "checkpoint_0"
    one.save_state(str(good))
    # The record of the save's owner, beside it, goes when the main process has left save_state().
    one.wait_for_everyone()
    mine = folder / f"disk-{one.process_index}"
    shutil.copytree(folder / "checkpoints", mine / "checkpoints")
    if one.process_index == damaged:
        (mine / "checkpoints" / "checkpoint_0" / "model.safetensors").unlink()
    one.wait_for_everyone()
    if automatic:
        one.project_configuration.automatic_checkpoint_naming = True
        one.project_configuration.project_dir = str(mine)
    copy = mine / "checkpoints" / "checkpoint_0"
    first = told(lambda: one.load_state(None if automatic else str(copy)))
    one.project_configuration.automatic_checkpoint_naming = False
    return first, told(lambda: one.load_state(str(good)))


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_file_that_is_missing_on_one_rank(two: Processes, tmp_path: Path, damaged: int) -> None:
    for first, second in two.run(load_copies, tmp_path, False, damaged):
        assert first.startswith("CheckpointError")
        assert "model.safetensors" in first
        assert second == "no error"


def test_a_newest_checkpoint_that_rank_0_cannot_read(two: Processes, tmp_path: Path) -> None:
    for first, second in two.run(load_copies, tmp_path, True, 0):
        assert first.startswith("CheckpointError")
        assert second == "no error"


def load_where_one_finds_nothing(folder: Path) -> tuple[str, str]:
    one, _model = accelerator()
    one.save_state(str(folder / "good"))
    name = "good" if one.process_index == 0 else "absent"
    return told(lambda: one.load_state(str(folder / name))), told(lambda: one.load_state(str(folder / "good")))


def test_a_checkpoint_that_one_rank_does_not_find(two: Processes, tmp_path: Path) -> None:
    for first, second in two.run(load_where_one_finds_nothing, tmp_path):
        assert "There is no such folder" in first
        assert second == "no error"


def save_under_a_name_that_is_too_long(folder: Path) -> str:
    one, _model = accelerator(automatic_checkpoint_naming=True, project_dir=str(folder))
    if one.process_index == 0:
        one.project_configuration.project_dir = str(folder / ("x" * 300))
    return told(lambda: one.save_state())


def test_an_error_of_the_system_while_rank_0_chooses_the_name(two: Processes, tmp_path: Path) -> None:
    assert all("File name too long" in first for first in two.run(save_under_a_name_that_is_too_long, tmp_path))
