"""Results of a short last batch of a custom batch sampler count as often as the batch has samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from accel_testing.processes import Processes
from accel_torch import Accelerator

ALONE = pytest.mark.usefixtures("fresh_state")


class OfSizes(BatchSampler):
    """Gives batches of the sizes it was told, of which `batch_size` is the largest."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__(range(sum(sizes)), max(sizes), False)
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(self.sampler)
        for size in self.sizes:
            yield [next(order) for _ in range(size)]

    def __len__(self) -> int:
        return len(self.sizes)


@ALONE
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("sizes", [(4, 4, 3), (4, 3, 4), (2, 4, 3, 3), (4, 4), (3, 4, 1)])
def test_a_loss_repeated_for_a_full_batch(sizes: tuple[int, ...], workers: int) -> None:
    accelerator = Accelerator(cpu=True)
    dataset = TensorDataset(torch.arange(sum(sizes)))
    loader = accelerator.prepare(DataLoader(dataset, batch_sampler=OfSizes(sizes), num_workers=workers))
    repeated, samples = [], []
    for (batch,) in loader:
        repeated.append(len(accelerator.gather_for_metrics(batch.float().mean().repeat(max(sizes)))))
        samples += accelerator.gather_for_metrics(batch).tolist()
    # Only the last batch is known to be the last of the data; a script repeats for the others as it likes.
    assert repeated == [max(sizes)] * (len(sizes) - 1) + [sizes[-1]]
    assert samples == list(range(sum(sizes)))


def shapes_and_samples(backend: str, sizes: tuple[int, ...]) -> tuple[int, list[int], list[tuple[int, ...]]]:
    accelerator = Accelerator(cpu=True, backend=backend)
    model, loader = accelerator.prepare(
        torch.nn.Linear(1, 1), DataLoader(TensorDataset(torch.arange(sum(sizes))), batch_sampler=OfSizes(sizes))
    )
    samples, shapes = [], []
    for (batch,) in loader:
        accelerator.backward(model(batch.float().unsqueeze(1)).mean())
        samples += accelerator.gather_for_metrics(batch).tolist()
        shapes.append(tuple(batch.shape))
    return len(loader), sorted(samples), shapes


@pytest.mark.parametrize("world", ["two", "three"])
@pytest.mark.parametrize("backend", ["ddp", "fsdp2"])
def test_short_batches_in_the_middle_of_an_epoch(request: pytest.FixtureRequest, world: str, backend: str) -> None:
    processes: Processes = request.getfixturevalue(world)
    for sizes in [(4, 2, 1, 1), (4, 2, 4, 4, 1), (2, 2, 4)]:
        check_short_batches(processes, backend, sizes)


def check_short_batches(processes: Processes, backend: str, sizes: tuple[int, ...]) -> None:
    everyones = processes.run(shapes_and_samples, backend, sizes)
    for steps, samples, shapes in everyones:
        assert samples == list(range(sum(sizes)))
        assert len(shapes) == steps
        assert shapes == everyones[0][2]
