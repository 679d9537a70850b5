"""The samples of one process out of a stream that all of them read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_data import IterableDatasetShard
from accel_state.errors import SettingError
from accel_testing.streams import Stream


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.samples)


class Shuffled(Stream):
    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.generator = torch.Generator().manual_seed(99)

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self.samples), generator=self.generator).tolist())


class Epochs(Stream):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return (self.epoch + sample for sample in self.samples)


@settings(deadline=None)
@given(
    length=st.integers(0, 80),
    size=st.integers(1, 5),
    processes=st.integers(1, 6),
    split=st.booleans(),
    drop_last=st.booleans(),
    even=st.booleans(),
)
def test_the_stream_is_dealt_out_step_by_step(
    length: int, size: int, processes: int, split: bool, drop_last: bool, even: bool
) -> None:
    size = size * processes if split else size
    width = size // processes if split else size
    expected: list[list[int]] = [[] for _ in range(processes)]
    order, step_size = list(range(length)), width * processes
    for at in range(0, length, step_size):
        step = order[at : at + step_size]
        if len(step) < step_size and drop_last:
            continue
        while even and processes > 1 and len(step) < step_size:
            step = step + order[: step_size - len(step)]
        for process in range(processes):
            expected[process] += step[process * width : (process + 1) * width]
    for process in range(processes):
        shard = IterableDatasetShard(Sized(length), size, drop_last, processes, process, split, even_batches=even)
        assert list(shard) == expected[process]
        assert len(shard) == len(expected[process])


def test_a_stream_without_length_has_none() -> None:
    with pytest.raises(TypeError, match="has no len"):
        len(IterableDatasetShard(Stream(3)))


def test_a_generator_is_seeded_by_the_epoch_so_that_all_processes_read_the_same() -> None:
    shards = [IterableDatasetShard(Shuffled(8), 2, False, 2, process) for process in range(2)]
    torch.rand(3)
    for epoch in (0, 3):
        for shard in shards:
            shard.set_epoch(epoch)
        order = torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).tolist()
        assert list(shards[0]) == order[0:2] + order[4:6]
        assert list(shards[1]) == order[2:4] + order[6:8]


def test_a_stream_receives_its_epoch() -> None:
    shard = IterableDatasetShard(Epochs(4), 2, False, 2, 1)
    shard.set_epoch(10)
    assert list(shard) == [12, 13]


@pytest.mark.parametrize("arguments", [(2, False, 2, 2), (3, False, 2, 0, True), (2, False, 0, 0)])
def test_impossible_parts_of_a_stream_are_refused(arguments: tuple[int, bool, int, int]) -> None:
    with pytest.raises(SettingError):
        IterableDatasetShard(Stream(4), *arguments)
