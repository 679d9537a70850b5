"""Examples of training and of evaluating hold through both names of the library, on one process and on two."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_testing.fresh import fresh
from accel_testing.processes import Processes

LIBRARIES = ("accelerate", "accel_torch")
SAMPLES = 12


def parts(samples: int = SAMPLES, batch_size: int = 2) -> tuple[Any, nn.Module, torch.optim.Optimizer, Any]:
    """A loader, a model, an optimizer and a scheduler."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    inputs = torch.arange(samples * 3.0).reshape(samples, 3) / 30
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return DataLoader(data, batch_size=batch_size), model, optimizer, scheduler


loss_func = nn.functional.mse_loss


def trained(accelerator: Any, model: Any) -> list[float]:
    weights: list[float] = accelerator.unwrap_model(model).weight.detach().flatten().tolist()
    return [round(weight, 5) for weight in weights]


def accumulating(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=4)
    dataloader, model, optimizer, scheduler = accelerator.prepare(*parts(8, 2 // accelerator.num_processes))
    steps = 0
    for inputs, targets in dataloader:
        with accelerator.accumulate(model):
            loss = loss_func(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
    return steps, trained(accelerator, model)


def clipping(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=2)
    dataloader, model, optimizer, _ = accelerator.prepare(*parts())
    norms = []
    for inputs, targets in dataloader:
        with accelerator.accumulate(model):
            accelerator.backward(1000 * loss_func(model(inputs), targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                norms.append(round(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item(), 4))
                accelerator.clip_grad_value_(model.parameters(), 0.1)
                assert max(p.grad.abs().max().item() for p in model.parameters()) <= 0.1 + 1e-6
            optimizer.step()
            optimizer.zero_grad()
    return norms


def two_forwards(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(cpu=True)
    dataloader, model, optimizer, _ = accelerator.prepare(*parts())
    batches = iter(dataloader)
    (input_a, target_a), (input_b, target_b) = next(batches), next(batches)
    with accelerator.no_sync():
        loss_a = loss_func(model(input_a), target_a)
        loss_b = loss_func(model(input_b), target_b)
    accelerator.backward(loss_a)
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(loss_b)
    optimizer.step()
    optimizer.zero_grad()
    return trained(accelerator, model)


def without_sync(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(cpu=True)
    dataloader, model, optimizer = accelerator.prepare(*parts()[:3])
    batches = iter(dataloader)
    with accelerator.no_sync(model):
        inputs, targets = next(batches)
        accelerator.backward(loss_func(model(inputs), targets))
    inputs, targets = next(batches)
    accelerator.backward(loss_func(model(inputs), targets))
    optimizer.step()
    return trained(accelerator, model)


def uneven_inputs(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(cpu=True)
    dataloader, model, optimizer, _ = parts(5, 1)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for inputs, targets in dataloader:
            loss_func(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
    return batches, trained(accelerator, model)


def stopping_early(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(cpu=True)
    seen = []
    for step in range(6):
        should_stop = accelerator.is_last_process and step == 3
        if should_stop:
            accelerator.set_trigger()
        seen.append(step)
        if accelerator.check_trigger():
            break
    again = accelerator.check_breakpoint()
    return seen, again


def half_precision(library: Any, folder: Path) -> Any:
    handlers = [
        library.AutocastKwargs(enabled=True, cache_enabled=False),
        library.GradScalerKwargs(init_scale=2**10, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000),
    ]
    accelerator = library.Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers)
    dataloader, model, optimizer, _ = accelerator.prepare(*parts())
    for inputs, targets in dataloader:
        accelerator.backward(loss_func(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    with accelerator.autocast():
        inside = nn.functional.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype
    with accelerator.autocast(autocast_handler=library.AutocastKwargs(enabled=False)):
        reverted = nn.functional.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype
    return accelerator.scaler.get_scale(), str(inside), str(reverted)


def evaluating(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(cpu=True)
    dataloader = accelerator.prepare(DataLoader(range(9), batch_size=5))
    first = len(accelerator.gather_for_metrics(next(iter(dataloader))))
    everything = [item for batch in dataloader for item in accelerator.gather_for_metrics(batch).tolist()]
    objects = [
        item for batch in dataloader for item in accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)
    ]
    return first, everything, objects


def padding_and_reducing(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(cpu=True)
    own = torch.arange(accelerator.process_index + 1).to(accelerator.device)
    padded = accelerator.pad_across_processes(own)
    given = torch.arange(accelerator.num_processes) + 1 + (2 * accelerator.process_index)
    summed = accelerator.reduce(given, reduction="sum").tolist()
    gathered = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
    return list(padded.shape), summed, gathered


def splitting(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(cpu=True)
    with accelerator.split_between_processes(["A", "B", "C"]) as inputs:
        own = list(inputs)
    with accelerator.split_between_processes(["A", "B", "C"], apply_padding=True) as inputs:
        return own, list(inputs)


def who_runs(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(cpu=True)
    ran = []
    accelerator.on_main_process(lambda: ran.append("main"))()
    accelerator.on_local_main_process(lambda: ran.append("local main"))()
    accelerator.on_last_process(lambda: ran.append("last"))()
    accelerator.on_process(lambda: ran.append("process 1"), process_index=1)()

    @accelerator.on_local_process(local_process_index=0)
    def print_something() -> None:
        ran.append("local 0")

    print_something()
    with accelerator.main_process_first():
        first = (folder / "first").exists()
        (folder / "first").touch()
    with accelerator.local_main_process_first():
        ran.append("in turn")
    accelerator.wait_for_everyone()
    return ran, first


def everyone_waits(library: Any, folder: Path) -> Any:
    accelerator = library.Accelerator(cpu=True)
    if accelerator.is_main_process:
        time.sleep(0.2)
        (folder / "made").touch()
    accelerator.wait_for_everyone()
    return (folder / "made").exists()


def descended(*steps: Sequence[tuple[float, int, int]]) -> list[float]:
    """Weights after plain steps: for each, how much which samples count, by the mean of their losses."""
    loader, model, optimizer, _ = parts()
    inputs, targets = loader.dataset.tensors
    for step in steps:
        optimizer.zero_grad()
        for share, first, last in step:
            (share * loss_func(model(inputs[first:last]), targets[first:last])).backward()
        optimizer.step()
    return [round(weight, 5) for weight in model.weight.detach().flatten().tolist()]


def on_both(value: Any) -> list[Any]:
    return [value, value]


ALL_AT_ONCE = (1, descended([(1, 0, 8)]))
TWO_BATCHES = descended([(1, 0, 2), (1, 2, 4)])
BATCHES_OF_BOTH = descended([(0.5, 0, 2), (0.5, 2, 4), (0.5, 4, 6), (0.5, 6, 8)])
ONE_BY_ONE = descended(*([(1, index, index + 1)] for index in range(5)))
UNTIL_BOTH_ARE_DONE = descended([(0.5, 0, 1), (0.5, 1, 2)], [(0.5, 2, 3), (0.5, 3, 4)], [(0.5, 4, 5)])

ALONE = {
    "accumulating": ALL_AT_ONCE,
    "clipping": [0.5] * 3,
    "two_forwards": TWO_BATCHES,
    "without_sync": TWO_BATCHES,
    "uneven_inputs": (5, ONE_BY_ONE),
    "stopping_early": ([0, 1, 2, 3], False),
    "half_precision": (1024.0, "torch.float16", "torch.float32"),
    "evaluating": (5, list(range(9)), list(range(9))),
    "padding_and_reducing": ([1], [1], [0]),
    "splitting": (["A", "B", "C"], ["A", "B", "C"]),
    "who_runs": (["main", "local main", "last", "process 1", "local 0", "in turn"], False),
    "everyone_waits": True,
}
TOGETHER = {
    "accumulating": on_both(ALL_AT_ONCE),
    "clipping": on_both([0.5] * 2),
    "two_forwards": on_both(BATCHES_OF_BOTH),
    "without_sync": on_both(BATCHES_OF_BOTH),
    "uneven_inputs": [(3, UNTIL_BOTH_ARE_DONE), (2, UNTIL_BOTH_ARE_DONE)],
    "stopping_early": on_both(([0, 1, 2, 3], False)),
    "half_precision": on_both(ALONE["half_precision"]),
    "evaluating": on_both((9, list(range(9)), list(range(9)))),
    "padding_and_reducing": on_both(([2], [4, 6], [0, 1])),
    "splitting": [(["A", "B"], ["A", "B"]), (["C"], ["C", "C"])],
    "who_runs": [(["main", "local main", "local 0", "in turn"], False), (["last", "process 1", "in turn"], True)],
    "everyone_waits": on_both(True),
}


SCENES = {
    scene.__name__: scene
    for scene in (
        accumulating,
        clipping,
        two_forwards,
        without_sync,
        uneven_inputs,
        stopping_early,
        half_precision,
        evaluating,
        padding_and_reducing,
        splitting,
        who_runs,
        everyone_waits,
    )
}


def play(library: str, scene: str, folder: str) -> Any:
    return SCENES[scene](importlib.import_module(library), Path(folder))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("scene", SCENES)
def test_training_example_on_one_process(scene: str, library: str, tmp_path: Path) -> None:
    with fresh():
        assert play(library, scene, str(tmp_path)) == ALONE[scene]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("scene", SCENES)
def test_training_example_on_two_processes(scene: str, library: str, two: Processes, tmp_path: Path) -> None:
    assert two.run(play, library, scene, str(tmp_path)) == TOGETHER[scene]
