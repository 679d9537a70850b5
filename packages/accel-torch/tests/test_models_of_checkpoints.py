"""Which saved model is loaded into which prepared one, also for models that are only evaluated."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_state.errors import CheckpointError
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import Accelerator, ProjectConfiguration


def accelerator(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, project_config=ProjectConfiguration(fsync=False), **options)


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def values(*models: Any) -> list[float]:
    return [next(iter(model.parameters())).flatten()[0].item() for model in models]


def distillation(run: Accelerator, teacher_first: bool = True) -> tuple[Any, Any]:
    """A teacher that is only evaluated, and a student of the same shape."""
    teacher, student = nn.Linear(2, 2), nn.Linear(2, 2)
    if teacher_first:
        teacher = run.prepare_model(teacher, evaluation_mode=True)
    student, _ = run.prepare(student, torch.optim.SGD(student.parameters(), 0.1))
    if not teacher_first:
        teacher = run.prepare_model(teacher, evaluation_mode=True)
    return teacher, student


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("teacher_first", [True, False])
def test_a_teacher_is_saved_and_loaded_like_the_student(tmp_path: Path, teacher_first: bool, behind: bool) -> None:
    with fresh():
        run = accelerator()
        teacher, student = distillation(run, teacher_first)
        fill(teacher, 7.0)
        fill(student, 1.0)
        run.save_state(str(tmp_path / "a"), async_save=behind)
        run.wait_for_checkpoint()
    with fresh():
        run = accelerator()
        models = distillation(run, teacher_first)
        run.load_state(str(tmp_path / "a"))
        assert values(*models) == [7.0, 1.0]


def originals(folder: Path, *filled: float) -> Path:
    """The models of a checkpoint as the original library writes them, in the order of preparation."""
    folder.mkdir()
    for index, value in enumerate(filled):
        model = nn.Linear(2, 2)
        fill(model, value)
        save_file(model.state_dict(), folder / (f"model_{index}.safetensors" if index else "model.safetensors"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    return folder


def load_originals(run: Accelerator, folder: Path, **options: Any) -> None:
    run.load_state(str(folder), allow_missing=("random_states",), **options)


def test_a_checkpoint_of_the_original_is_loaded_into_the_models_that_it_saved(tmp_path: Path) -> None:
    folder = originals(tmp_path / "a", 7.0, 1.0)
    with fresh():
        run = accelerator()
        models = distillation(run)
        load_originals(run, folder)
        assert values(*models) == [7.0, 1.0]


def test_more_models_than_are_prepared_are_an_error_before_anything_changes(tmp_path: Path) -> None:
    folder = originals(tmp_path / "a", 7.0, 1.0)
    with fresh():
        run = accelerator()
        student = nn.Linear(2, 2)
        fill(student, 3.0)
        student, _ = run.prepare(student, torch.optim.SGD(student.parameters(), 0.1))
        with pytest.raises(CheckpointError, match=r"(?s)It has 2 \(model 0, model 1\), and 1 are prepared \(Linear\)"):
            load_originals(run, folder)
        assert values(student) == [3.0]
        load_originals(run, folder, allow_unread=("models",))
        assert values(student) == [7.0]


def test_names_and_shapes_say_which_model_is_meant(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fresh():
        run = accelerator()
        wide, narrow = run.prepare(nn.Linear(2, 5), nn.Linear(2, 2))
        fill(wide, 5.0)
        fill(narrow, 2.0)
        run.save_state(str(tmp_path / "a"))
    with fresh():
        run = accelerator()
        narrow, wide = run.prepare(nn.Linear(2, 2), nn.Linear(2, 5))
        run.load_state(str(tmp_path / "a"))
        assert values(narrow, wide) == [2.0, 5.0]
    with fresh(), caplog.at_level(logging.WARNING):
        run = accelerator()
        narrow = run.prepare(nn.Linear(2, 2))
        run.load_state(str(tmp_path / "a"))
        assert values(narrow) == [2.0]
    assert "model 0 not loaded" in caplog.text


def test_a_model_that_is_evaluated_and_then_trained_is_one_model(tmp_path: Path) -> None:
    with fresh():
        run = accelerator()
        model = nn.Linear(2, 2)
        for _ in range(2):
            run.prepare_model(model, evaluation_mode=True)
        assert len(run.session.prepared.all_models) == 1
        prepared = run.prepare(model)
        run.prepare_model(prepared, evaluation_mode=True)
        assert run.session.prepared.all_models == [prepared]
        run.free_memory()
        assert run.session.prepared.all_models == []


def test_all_that_nobody_reads_besides_models_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fresh():
        run = accelerator()
        model = nn.Linear(2, 2)
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(3)]
        schedulers = [torch.optim.lr_scheduler.ConstantLR(one) for one in optimizers[:2]]
        run.prepare(model, *optimizers, *schedulers)
        run.save_state(str(tmp_path / "a"))
    with fresh(), caplog.at_level(logging.WARNING):
        run = accelerator()
        model = nn.Linear(2, 2)
        run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        run.load_state(str(tmp_path / "a"))
    unread = [record.getMessage() for record in caplog.records if "not loaded" in record.getMessage()]
    assert len(unread) == 1
    assert "optimizer_1.bin, optimizer_2.bin, scheduler.bin, scheduler_1.bin" in unread[0]


def teacher_on_two(folder: str, backend: str, behind: bool) -> list[float]:
    options: dict[str, Any] = {}
    if backend != "ddp":
        from accel_torch import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=backend)
    run = accelerator(**options)
    teacher, student = distillation(run)
    fill(teacher, 7.0)
    fill(student, 1.0)
    run.save_state(folder, async_save=behind)
    run.wait_for_checkpoint()
    fill(teacher, 0.0)
    fill(student, 0.0)
    run.load_state(folder)
    found = run.get_state_dict(student)
    return [*values(teacher), *(value.flatten()[0].item() for value in list(found.values())[:1])]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("backend", ["ddp", "FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_teacher_beside_a_sharded_student(two: Processes, tmp_path: Path, backend: str, behind: bool) -> None:
    first, second = two.run(teacher_on_two, str(tmp_path / "a"), backend, behind)
    assert first == [7.0, 1.0]
    assert second[0] == 7.0


class Picky:
    """Takes no state."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("not this one")


@pytest.mark.parametrize("missing", ["random_states_0.pkl", "custom_checkpoint_0.pkl"])
def test_what_is_missing_is_an_error_before_anything_changes(tmp_path: Path, missing: str) -> None:
    with fresh():
        run = accelerator()
        model, _ = run.prepare(nn.Linear(2, 2), torch.utils.data.DataLoader(list(range(4))))
        run.register_for_checkpointing(torch.optim.SGD(model.parameters(), 0.1))
        fill(model, 1.0)
        run.save_state(str(tmp_path / "a"))
        (tmp_path / "a" / missing).unlink()
        (tmp_path / "a" / "checkpoint_manifest.json").unlink()
        fill(model, 2.0)
        with pytest.raises(CheckpointError):
            run.load_state(str(tmp_path / "a"))
        assert values(model) == [2.0]


def test_an_object_that_takes_no_state_says_what_is_restored_already(tmp_path: Path) -> None:
    with fresh():
        run = accelerator()
        run.prepare(nn.Linear(2, 2))
        run.register_for_checkpointing(Picky())
        run.save_state(str(tmp_path / "a"))
        with pytest.raises(CheckpointError, match=r"(?s)not this one\. Models, optimizers and sch"):
            run.load_state(str(tmp_path / "a"))
