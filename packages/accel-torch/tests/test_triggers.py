"""A flag that one process raises is seen by all of them, once; stopping early by it; evenness for a while."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_testing.recording_transport import recording
from accel_testing.streams import Stream
from accel_torch import Accelerator


def raised_by_the_second() -> tuple[list[bool], int]:
    accelerator = Accelerator(cpu=True)
    seen = [accelerator.check_trigger()]
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    with recording() as records:
        seen.append(accelerator.check_breakpoint())
    seen.append(accelerator.check_trigger())
    return seen, len(records)


def test_check_trigger_is_true_once_on_all_processes(two: Processes) -> None:
    assert two.run(raised_by_the_second) == [([False, True, False], 1)] * 2


def stopped_early() -> int:
    accelerator = Accelerator(cpu=True)
    model, loader = nn.Linear(1, 1), DataLoader(TensorDataset(torch.arange(32.0).reshape(-1, 1)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for step, (inputs,) in enumerate(loader):
        accelerator.backward(model(inputs).square().mean())
        # Only one process finds out that it goes wrong.
        if accelerator.is_last_process and step == 3:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            return step
        optimizer.step()
        optimizer.zero_grad()
    return -1


def test_one_process_stops_all(two: Processes) -> None:
    assert two.run(stopped_early) == [3, 3]


def test_triggers_of_one_process() -> None:
    with fresh():
        accelerator = Accelerator(cpu=True)
        assert accelerator.flag_tensor is None
        accelerator.set_trigger()
        accelerator.set_trigger()
        assert accelerator.flag_tensor is not None
        assert accelerator.flag_tensor.item() == 1
        assert accelerator.check_trigger()
        assert not accelerator.check_trigger()
        accelerator.flag_tensor = torch.tensor(1)
        assert accelerator.check_trigger()


def joined(even: bool | None) -> tuple[int, list[float], bool]:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model: Any = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = DataLoader(TensorDataset(torch.arange(1.0, 7.0).reshape(-1, 1)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=even):
        for (inputs,) in loader:
            batches += 1
            accelerator.backward(model(inputs).sum())
            optimizer.step()
            optimizer.zero_grad()
    return batches, [round(w, 4) for w in model.module.weight.flatten().tolist()], loader.batch_sampler.even_batches


def test_processes_with_fewer_batches_help_the_others(two: Processes) -> None:
    first, second = two.run(joined, False)
    assert (first[0], second[0]) == (2, 1)
    assert first[1] == second[1]
    assert (first[2], second[2]) == (True, True)


def test_without_a_word_about_evenness_all_have_as_many(two: Processes) -> None:
    first, second = two.run(joined, None)
    assert first[0] == second[0] == 2


def test_join_changes_nothing_alone() -> None:
    with fresh():
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(1, 1))
        with accelerator.join_uneven_inputs([model], even_batches=False):
            accelerator.backward(model(torch.ones(1, 1)).sum())
        assert model.weight.grad is not None


def test_evenness_is_back_after_an_error_and_what_cannot_follow_is_named() -> None:
    with fresh():
        accelerator = Accelerator(cpu=True)
        mapped: Any = accelerator.prepare(DataLoader(TensorDataset(torch.ones(3, 1)), batch_size=2))
        mapped.batch_sampler.even_batches = True

        def fail_inside() -> None:
            with accelerator.join_uneven_inputs([], even_batches=False):
                raise KeyError(mapped.batch_sampler.even_batches)

        with pytest.raises(KeyError, match="False"):
            fail_inside()
        assert mapped.batch_sampler.even_batches
        accelerator.prepare(DataLoader(Stream(4), batch_size=2))
        with (
            pytest.warns(UserWarning, match="loaders over streams"),
            accelerator.join_uneven_inputs([], even_batches=False),
        ):
            pass
