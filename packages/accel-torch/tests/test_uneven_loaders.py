"""`even_batches=False` where the processes wait for each other in every step: refused before it could hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader

from accel_data import DataLoaderConfiguration
from accel_state.errors import Conflict
from accel_testing.processes import Processes
from accel_torch import Accelerator, FullyShardedDataParallelPlugin

pytestmark = pytest.mark.usefixtures("fresh_state")


class Listed(BatchSampler):
    """A custom batch sampler."""


def steps(lengths: list[int]) -> list[Any]:
    """For each length, the number of optimizer steps of this process, or why the loader is refused."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    configuration = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, dataloader_config=configuration)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found: list[Any] = []
    for length in lengths:
        data: Any = torch.arange(float(length)).reshape(length, 1)
        try:
            loader = accelerator.prepare(DataLoader(data, batch_size=2))
        except Conflict as error:
            found.append(str(error))
            continue
        count = 0
        for batch in loader:
            accelerator.backward(model(batch).sum())
            optimizer.step()
            count += 1
        found.append(count)
    return found


@pytest.mark.parametrize(("world", "count"), [("two", 2), ("three", 3)])
def test_an_uneven_number_of_steps_is_refused_by_fsdp2(world: str, count: int, request: pytest.FixtureRequest) -> None:
    processes: Processes = request.getfixturevalue(world)
    # With the third length, all processes have a batch in the last step.
    lengths = [12 * count + 1, 12 * count, 12 * count - 1]
    for text, even, short in processes.run(steps, lengths):
        assert "Cannot prepare a loader with even_batches=False." in text
        assert f"Process 0 of {count} would have 7 batches, and process {count - 1} 6" in text
        assert (even, short) == (6, 6)


def refused_custom() -> str:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    configuration = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, dataloader_config=configuration)
    data: Any = torch.arange(10)
    accelerator.prepare(DataLoader(data, batch_sampler=Listed(range(8), 2, False)))
    with pytest.raises(Conflict) as caught:
        accelerator.prepare(DataLoader(data, batch_sampler=Listed(range(10), 2, False)))
    accelerator.prepare(DataLoader(data, batch_size=2, drop_last=True))
    return str(caught.value)


def test_a_custom_batch_sampler_is_refused_too(two: Processes) -> None:
    for text in two.run(refused_custom):
        assert "would have 3 batches, and process 1 2" in text


def read_by_each_process() -> int:
    configuration = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    return len(list(accelerator.prepare(DataLoader(torch.arange(25), batch_size=2))))  # type: ignore[arg-type]


def test_backends_that_do_not_wait_read_on(two: Processes) -> None:
    assert two.run(read_by_each_process) == [7, 6]
