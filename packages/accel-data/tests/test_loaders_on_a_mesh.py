"""Loaders on a mesh: processes with equal coordinates on the data axes get the same samples."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from accel_data import audit, prepare_data_loader
from accel_state import PartialState
from accel_state.errors import SettingError
from accel_testing.processes import Processes


class Samples(Dataset[torch.Tensor]):
    """Samples that are their index and a random number."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random()], dtype=torch.float64)


class Files(IterableDataset[torch.Tensor]):
    """A stream that can divide itself, into parts of different lengths."""

    def __init__(self, *files: range) -> None:
        self.files = files

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> Files:
        return Files(*self.files[index::num_shards])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([index, 0.0], dtype=torch.float64) for file in self.files for index in file)


class Custom(BatchSampler):
    """A batch sampler that is not torch's."""


def plain(kind: str) -> tuple[DataLoader[Any], dict[str, Any]]:
    if kind == "custom":
        return DataLoader(Samples(), batch_sampler=Custom(RandomSampler(Samples()), 2, False)), {}
    if kind == "files":
        return DataLoader(Files(range(8), range(8, 13)), batch_size=2), {}
    if kind == "stream":
        return DataLoader(Files(range(13)), batch_size=2), {}
    options = {"seedable": {"use_seedable_sampler": True}, "seeded samples": {"seed_samples": True}}
    options |= {"dispatched": {"dispatch_batches": True}, "restored": {"restore_position": True}}
    return DataLoader(Samples(), batch_size=2, shuffle=True), options.get(kind, {})


KINDS = ("shuffled", "seedable", "seeded samples", "restored", "custom", "dispatched", "files", "stream")


def epochs(shape: tuple[int, ...], names: tuple[str, ...]) -> list[Any]:
    state = PartialState(cpu=True)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    found = []
    for kind in KINDS:
        torch.manual_seed(100 + state.process_index)
        random.seed(state.process_index)
        loader, options = plain(kind)
        prepared: Any = prepare_data_loader(loader, put_on_device=True, torch_device_mesh=mesh, **options)
        steps = []
        for batch in prepared:
            real = None if prepared.progress.padding is None else prepared.progress.padding.of(prepared.source.index)
            steps.append((batch.tolist(), real))
        found.append((audit(prepared), steps))
    return found


@pytest.mark.parametrize(
    ("shape", "names", "parts"),
    [
        ((2, 2), ("dp_shard", "tp"), [[0, 1], [2, 3]]),
        ((2, 2), ("cp", "dp_replicate"), [[0, 2], [1, 3]]),
        ((4,), ("tp",), [[0, 1, 2, 3]]),
        ((2, 2), ("dp_replicate", "dp_shard"), [[0], [1], [2], [3]]),
    ],
)
def test_processes_of_one_data_rank_get_the_same_samples(
    four: Processes, shape: tuple[int, ...], names: tuple[str, ...], parts: list[list[int]]
) -> None:
    by_process = four.run(epochs, shape, names)
    for number, kind in enumerate(KINDS):
        found = [process[number] for process in by_process]
        assert [one for one, _ in found].count(found[0][0]) == 4, kind
        assert found[0][0].exact, kind
        assert len(found[0][0].per_process) == len(parts), kind
        assert len({len(steps) for _, steps in found}) == 1, kind
        seen = []
        for ranks in parts:
            first, *same = [[[row[0] for row in rows] for rows, _ in found[rank][1]] for rank in ranks]
            assert all(steps == first for steps in same), kind
            seen += [index for rows in first for index in rows]
        assert set(seen) == set(range(13)), kind
        if kind == "seeded samples":
            assert all(found[rank][1] == found[ranks[0]][1] for ranks in parts for rank in ranks)


def nameless() -> str:
    PartialState(cpu=True)
    with pytest.raises(SettingError) as caught:
        prepare_data_loader(DataLoader(range(8)), torch_device_mesh=init_device_mesh("cpu", (4,)))  # type: ignore[arg-type]
    return str(caught.value)


def test_a_mesh_without_names_says_nothing_of_the_data(four: Processes) -> None:
    assert all("mesh_dim_names" in text for text in four.run(nameless))
