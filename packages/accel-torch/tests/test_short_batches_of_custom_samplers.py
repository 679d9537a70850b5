"""Results of a short last batch of a custom batch sampler count as often as the batch has samples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from accel_torch import Accelerator

pytestmark = pytest.mark.usefixtures("fresh_state")


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
