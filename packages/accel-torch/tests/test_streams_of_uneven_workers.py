"""Streams that DataLoader workers divide unevenly, with a short batch in the middle of an epoch: metrics are exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accel_data import DataLoaderConfiguration
from accel_testing.processes import Processes
from accel_torch import Accelerator

pytestmark = pytest.mark.usefixtures("fresh_state")

SAMPLES = 27


class Shards(IterableDataset[int]):
    """Three shards of nine samples, of which the first of two workers reads two; as WebDataset does."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for first in range(0, SAMPLES, 9)[number::count]:
            yield from range(first, first + 9)


def evaluated(cases: list[tuple[bool, bool]]) -> list[tuple[list[int], list[str], list[int]]]:
    """The gathered labels and names of two epochs, and the sizes of this process's batches."""
    found = []
    for split, drop_last in cases:
        configuration = DataLoaderConfiguration(dispatch_batches=True, split_batches=split)
        accelerator = Accelerator(cpu=True, dataloader_config=configuration)
        size = 4 * accelerator.num_processes if split else 4
        plain = DataLoader(Shards(), batch_size=size, num_workers=2, drop_last=drop_last)
        loader = accelerator.prepare(plain)
        labels: list[int] = []
        names: list[str] = []
        sizes = []
        for _ in range(2):
            for batch in loader:
                sizes.append(len(batch))
                labels += accelerator.gather_for_metrics((batch, batch % 3))[0].tolist()
                names += accelerator.gather_for_metrics([str(int(sample)) for sample in batch])
        found.append((labels, names, sizes))
    return found


@pytest.mark.parametrize(("world", "count"), [("one", 1), ("two", 2), ("three", 3)])
def test_every_sample_counts_once(world: str, count: int, request: pytest.FixtureRequest) -> None:
    processes: Processes = request.getfixturevalue(world)
    results = processes.run(evaluated, [(False, False), (True, False)], timeout=250)
    for ranks in zip(*results, strict=True):
        for labels, names, _ in ranks:
            assert sorted(labels) == sorted([*range(SAMPLES)] * 2)
            assert names == [str(label) for label in labels]
        # All processes have batches of one size in each step.
        assert len({tuple(sizes) for *_, sizes in ranks}) == 1
    assert len(results) == count
