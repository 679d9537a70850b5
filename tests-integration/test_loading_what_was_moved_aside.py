"""`load_state` finds a named checkpoint although the run that saved over it was killed between two renames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from faults import tracing
from torch import nn

from accel_plugins.checkpoint.recovery import staged_path
from accel_state.errors import CheckpointError
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import Accelerator, ProjectConfiguration


def trained(value: float) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(fsync=False))
    model = accelerator.prepare(nn.Linear(1, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return accelerator, model


def save(folder: Path, value: float) -> None:
    with fresh():
        trained(value)[0].save_state(str(folder))


def save_without_exchange(folder: Path, value: float) -> None:
    tracing.refuse_exchange()
    save(folder, value)


@pytest.mark.skipif(tracing.obstacle() is not None, reason=str(tracing.obstacle()))
def test_training_does_not_start_anew_after_a_death_between_the_two_renames(tmp_path: Path) -> None:
    target = tmp_path / "last"
    save(target, 1.0)
    for at in range(10):
        ended = tracing.run(
            lambda: save_without_exchange(target, 2.0), tmp_path, tracing.Fault(at, only=("rename",)), timeout=100
        )
        assert ended.hit is not None
        if ended.hit.other == target:
            break
    assert not target.exists()

    with fresh():
        accelerator, model = trained(0.0)
        assert accelerator.load_state(str(target), missing_ok=True) == str(target)
        # The new one was complete.
        assert model.weight.item() == 2.0
        assert accelerator.load_state(str(tmp_path / "never saved"), missing_ok=True) is None
        with pytest.raises(CheckpointError, match="no such folder"):
            accelerator.load_state(str(tmp_path / "never saved"))


def load_together(folders: list[str], missing_ok: bool) -> tuple[str | None, float]:
    accelerator, model = trained(0.0)
    try:
        found = accelerator.load_state(
            folders[accelerator.process_index], missing_ok=missing_ok, allow_missing=("random_states",)
        )
    except CheckpointError as error:
        return error.obstacle, 0.0
    return found, next(iter(model.parameters())).item()


def test_all_processes_find_what_one_of_them_puts_back(two: Processes, tmp_path: Path) -> None:
    target = tmp_path / "last"
    save(target, 1.0)
    target.rename(staged_path(target, "0123456789abcdef"))

    assert two.run(load_together, [str(target)] * 2, True) == [(str(target), 1.0)] * 2
    assert [entry.name for entry in tmp_path.glob("last*") if entry.is_dir()] == ["last"]
    assert two.run(load_together, [str(tmp_path / "never saved")] * 2, True) == [(None, 0.0)] * 2


@pytest.mark.parametrize("missing_ok", [True, False])
def test_a_checkpoint_that_one_process_does_not_see_is_refused_on_all(
    two: Processes, tmp_path: Path, missing_ok: bool
) -> None:
    target = tmp_path / "here" / "last"
    save(target, 1.0)
    told = two.run(load_together, [str(target), str(tmp_path / "elsewhere" / "last")], missing_ok)
    assert told == [("There is no such folder on process 1; the other processes have it.", 0.0)] * 2
