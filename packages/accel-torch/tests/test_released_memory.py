"""What is left of an Accelerator and of what it prepared, once a script has freed or dropped them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.fsdp.config import FullyShardedDataParallelPlugin
from accel_plugins.single.strategy import SingleStrategy
from accel_state import AcceleratorState
from accel_state.gradient import GradientState
from accel_state.watch.record import STATUS_RECORD
from accel_testing.processes import Processes
from accel_torch import Accelerator

pytestmark = pytest.mark.usefixtures("fresh_state")


def options(version: int) -> dict[str, Any]:
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(version)} if version else {}


def prepared(accelerator: Accelerator) -> list[Any]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
    return list(accelerator.prepare(model, optimizer, scheduler, loader))


def train(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> None:
    for (inputs,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def freed(version: int, folder: str, background: bool = False) -> dict[str, Any]:
    accelerator, other = Accelerator(cpu=True, **options(version)), Accelerator(cpu=True)
    kept = prepared(other)
    objects = prepared(accelerator)
    train(accelerator, *objects)
    train(other, *kept)
    accelerator.save_state(f"{folder}/first", async_save=background)
    inner = accelerator.unwrap_model(objects[0])
    watched = [weakref.ref(one) for one in (inner, objects[0], objects[1], objects[1].optimizer, objects[3])]
    del inner
    objects = accelerator.free_memory(*objects)
    gc.collect()
    other.save_state(f"{folder}/second")
    train(other, *kept)
    train(accelerator, *prepared(accelerator))
    return {"returned": objects, "alive": [one() is not None for one in watched]}


NOTHING = {"returned": [None] * 4, "alive": [False] * 5}


def test_free_memory_of_one_process(tmp_path: Path) -> None:
    assert freed(0, str(tmp_path)) == NOTHING


@pytest.mark.parametrize("version", [0, 1, 2], ids=["ddp", "fsdp1", "fsdp2"])
def test_free_memory_of_two_processes(two: Processes, tmp_path: Path, version: int) -> None:
    assert two.run(freed, version, str(tmp_path)) == [NOTHING] * 2


def test_a_function_that_accumulates_keeps_nothing_that_it_freed() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: Any = nn.Linear(4, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    watched = [weakref.ref(model)]
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(4):
        inputs = torch.ones(2, 4)
        watched.append(weakref.ref(inputs))
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    del inputs
    model, optimizer, scheduler = accelerator.free_memory(model, optimizer, scheduler)
    gc.collect()
    assert [one() for one in watched] == [None] * 5


def test_a_checkpoint_that_is_being_saved_is_not_lost(tmp_path: Path) -> None:
    assert freed(0, str(tmp_path), True) == NOTHING
    assert (tmp_path / "first").is_dir()


@pytest.mark.parametrize("whole", [True, False])
def test_a_strategy_is_closed_once_when_the_run_ends(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(SingleStrategy, "close", lambda strategy: closed.append(strategy))
    Accelerator(cpu=True)
    Accelerator(cpu=True)
    assert closed == []
    AcceleratorState._reset_state(whole)
    AcceleratorState._reset_state(True)
    assert len(closed) == 1


@pytest.fixture
def no_collector(fresh_state: None) -> Iterator[None]:
    # With its first optimizer torch imports more of itself, and keeps the frames of whoever made that one in a cycle.
    torch.optim.Adam(nn.Linear(1, 1).parameters())
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def everything(accelerator: Accelerator) -> list[Any]:
    return [*prepared(accelerator), accelerator, accelerator.gradient_state]


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("options", [{}, {"check_replicas_every": 1}, {"gradient_accumulation_steps": 2}], ids=str)
@pytest.mark.usefixtures("no_collector")
def test_what_a_script_drops_is_gone_at_once(steps: int, options: dict[str, Any]) -> None:
    objects = everything(Accelerator(cpu=True, **options))
    inner = [objects[1].optimizer, objects[2].scheduler]
    if steps:
        train(objects[4], *objects[:3], list(objects[3])[:steps])
    watched = [weakref.ref(one) for one in (*objects, *inner)]
    objects.clear()
    inner.clear()
    assert [one() is not None for one in watched] == [False] * 8


@pytest.mark.usefixtures("no_collector")
def test_an_iteration_that_is_dropped_takes_its_loader_with_it() -> None:
    objects = everything(Accelerator(cpu=True))
    batches = iter(objects[3])
    next(batches)
    watched = [weakref.ref(one) for one in objects]
    objects.clear()
    del batches
    assert [one() is not None for one in watched] == [False] * 6
    assert not GradientState().in_dataloader


@pytest.mark.usefixtures("no_collector")
def test_a_loader_that_was_left_at_its_last_batch_is_not_kept() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(3, 1)), batch_size=3))
    (inputs,) = next(iter(loader))
    assert accelerator.gradient_state.left is loader
    watched = weakref.ref(loader)
    accelerator.free_memory()
    del loader
    assert watched() is None
    assert torch.equal(accelerator.gather_for_metrics(inputs), inputs)


def test_unpickled_optimizers_and_loaders_work_without_their_run() -> None:
    _, optimizer, scheduler, loader = prepared(Accelerator(cpu=True))
    train(Accelerator(cpu=True), *prepared(Accelerator(cpu=True)))
    other, later, batches = pickle.loads(pickle.dumps((optimizer, scheduler, loader)))
    weight = other.param_groups[0]["params"][0]
    weight.grad = torch.ones_like(weight)
    before = weight.detach().clone()
    GradientState().sync_gradients = False
    other.step()
    assert torch.equal(weight, before)
    GradientState().sync_gradients = True
    other.step()
    assert not torch.equal(weight, before)
    assert later.get_last_lr() == scheduler.get_last_lr()
    assert len(list(batches)) == len(list(loader)) == 4


def copy_loaders() -> bool:
    """Copy a loader of which the launcher reads the samples; whether it still reads those of this loader."""
    *_, loader = prepared(Accelerator(cpu=True))
    batches = [len(batch[0]) for batch in loader]
    samples = STATUS_RECORD.samples
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert [len(batch[0]) for batch in other] == batches
    return STATUS_RECORD.samples is samples is not None


def test_loaders_of_a_launched_run_can_be_copied_and_pickled(two: Processes, tmp_path: Path) -> None:
    assert two.run(copy_loaders, environment={"ACCEL_STATUS_FOLDER": str(tmp_path)}) == [True, True]
