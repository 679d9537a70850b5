"""Streams that are divided at their source, on real processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from accel_data import DataLoaderDispatcher, DataLoaderShard, drop_padding, prepare_data_loader, skip_first_batches
from accel_data.streams import own_shard, shards_itself
from accel_ops import gather
from accel_state import PartialState
from accel_state.errors import Conflict, DataError, ShapeMismatch
from accel_testing.fresh import fresh
from accel_testing.processes import Processes


class Files(IterableDataset[int]):
    """A stream of several files of different lengths, which can be divided between processes; counts what is read."""

    epoch = 0

    def __init__(self, *files: range) -> None:
        self.files = files
        self.read: list[int] = []

    @property
    def num_shards(self) -> int:
        return len(self.files)

    def shard(self, num_shards: int, index: int) -> Files:
        return Files(*self.files[index::num_shards])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for file in self.files:
            for sample in file:
                self.read.append(sample)
                yield sample + 1000 * self.epoch


class ByNode(Files):
    def split_by_node(self, rank: int, world_size: int) -> Files:
        return self.shard(world_size, rank)


class Failing(Files):
    def __iter__(self) -> Iterator[int]:
        yield from self.files[0]
        raise ValueError("corrupt record")


def make(kind: str, length: int) -> Any:
    rank = PartialState(cpu=True).process_index
    parts = [range(length), range(100, 107)]
    if kind == "files":
        return DataLoader(Files(*parts), batch_size=3), {}
    if kind == "by node":
        return DataLoader(ByNode(*parts), batch_size=3), {}
    if kind == "function":
        return DataLoader(Files(*parts), batch_size=3), {"sharding": lambda data, count, at: data.shard(count, at)}
    if kind == "split":
        return DataLoader(Files(*parts), batch_size=6), {"split_batches": True}
    return DataLoader(Files(parts[rank]), batch_size=3), {"sharding": "already"}


def evaluated(cases: list[tuple[str, int, bool]]) -> list[dict[str, Any]]:
    from accel_ops import gather

    PartialState(cpu=True)
    results = []
    for kind, length, drop_last in cases:
        plain, options = make(kind, length)
        if drop_last:
            plain = DataLoader(plain.dataset, batch_size=plain.batch_size, drop_last=True)
        loader: Any = prepare_data_loader(plain, put_on_device=True, **options)
        assert type(loader) is DataLoaderShard
        kept: list[int] = []
        steps = 0
        for batch in loader:
            kept += drop_padding(gather(batch), loader.progress.padding).tolist()
            steps += 1
        results.append({"kept": sorted(kept), "read": sorted(loader.dataset.read), "steps": steps})
    return results


def test_each_process_reads_its_own_and_metrics_see_every_sample_once(two: Processes) -> None:
    kinds = ("files", "by node", "function", "split", "already")
    cases = [(kind, length, False) for kind, length in product(kinds, (1, 3, 7, 20))]
    for (kind, length, _), first, second in zip(cases, *two.run(evaluated, cases), strict=True):
        assert first["kept"] == second["kept"] == [*range(min(length, 100)), *range(100, 107)], kind
        assert (first["read"], second["read"]) == (list(range(length)), list(range(100, 107)))
        assert first["steps"] == second["steps"]


def test_dropping_the_last_ends_with_the_first_that_runs_out(two: Processes) -> None:
    first, second = two.run(evaluated, [("files", 20, True), ("files", 2, True)])
    assert [result["steps"] for result in first] == [result["steps"] for result in second] == [2, 0]
    assert first[0]["kept"] == [*range(6), *range(100, 106)]


def uneven() -> list[int]:
    PartialState(cpu=True)
    plain = DataLoader(Files(range(20), range(100, 107)), batch_size=3)
    return [len(batch) for batch in prepare_data_loader(plain, even_batches=False)]


def test_uneven_streams_may_end_by_themselves(two: Processes) -> None:
    assert two.run(uneven) == [[3] * 6 + [2], [3, 3, 1]]


def single_samples() -> list[tuple[int, Any]]:
    PartialState(cpu=True)
    loader: Any = prepare_data_loader(DataLoader(Files(range(2), range(100, 103)), batch_size=None))
    return [(int(sample), loader.progress.padding and loader.progress.padding.of(0)) for sample in loader]


def test_samples_that_are_not_batched_end_together(two: Processes) -> None:
    first, second = two.run(single_samples)
    assert first == [(0, None), (1, None), (1, 0)]
    assert [sample for sample, _ in second] == [100, 101, 102]


class Repeatable(IterableDataset[int]):
    """A stream of the rank's own length that declares that an epoch is repeatable."""

    def __init__(self, length: int) -> None:
        self.length = length

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def repeated_steps() -> tuple[list[tuple[list[int], int | None]], list[list[int]], list[list[int]]]:
    """The batches with their real samples; those after step 3; and those of a loader that resumes there."""
    rank = PartialState(cpu=True).process_index

    def make() -> Any:
        stream = Repeatable((5, 11, 4)[rank])
        return prepare_data_loader(DataLoader(stream, batch_size=2), sharding="already", restore_position=True)

    loader, batches, rest, state = make(), [], [], {}
    for number, batch in enumerate(loader, 1):
        padding = loader.progress.padding
        batches.append((batch.tolist(), None if padding is None else padding.of(rank)))
        if number == 4:
            state = loader.state_dict()
        if number > 4:
            rest.append(batch.tolist())
    again = make()
    again.load_state_dict(state)
    return batches, rest, [batch.tolist() for batch in again]


@pytest.mark.parametrize("world", ["two", "three"])
def test_a_process_whose_stream_has_ended_repeats_its_last_step(world: str, request: pytest.FixtureRequest) -> None:
    processes: Processes = request.getfixturevalue(world)
    (first, *after), (second, *others), *further = processes.run(repeated_steps)
    # A short last batch is completed from itself.
    assert [batch for batch, _ in first] == [[0, 1], [2, 3], [4, 4], [4, 4], [4, 4], [4]]
    assert [real for _, real in first[2:]] == [1, 0, 0, 0]
    assert [batch for batch, _ in second][-1] == [10]
    for third, *rest in further:
        assert [batch for batch, _ in third] == [[0, 1], [2, 3]] + [[2, 3]] * 3 + [[2]]
        assert [real for _, real in third[2:]] == [0] * 4
        assert rest[0] == rest[1] == [[2, 3], [2]]
    assert after[0] == after[1] == [[4, 4], [4]]
    assert others[0] == others[1] == [[8, 9], [10]]


def nothing() -> str:
    PartialState(cpu=True)
    plain = DataLoader(Files(range(0), range(5)), batch_size=2)
    with pytest.raises(DataError) as caught:
        list(prepare_data_loader(plain))
    return str(caught.value)


def test_a_process_without_any_sample_is_named(two: Processes) -> None:
    for text in two.run(nothing):
        assert "process 0 has no sample" in text


def failing() -> str:
    rank = PartialState(cpu=True).process_index
    data = Failing(range(4)) if rank else Files(range(10))
    loader = prepare_data_loader(DataLoader(data, batch_size=2), sharding="already")
    seen = 0
    try:
        for _ in loader:
            seen += 1
    except (ValueError, DataError) as error:
        return f"{seen} {type(error).__name__} {error}"
    return "nothing"


def test_a_stream_that_cannot_be_read_ends_all_processes_at_once(two: Processes) -> None:
    first, second = two.run(failing)
    assert first.startswith("2 DataError")
    assert "Process 1 could not read" in first
    assert second == "2 ValueError corrupt record"


def leaves_early(calls_in_the_loop: bool) -> str:
    """Process 0 leaves the loop after a step and gathers; process 1 goes on."""
    rank = PartialState(cpu=True).process_index
    loader = prepare_data_loader(DataLoader(Files(range(10), range(10)), batch_size=2), sharding="already")

    def loop() -> None:
        for number, batch in enumerate(loader):
            if number == 1 and rank == 0:
                break
            if number > 1 and calls_in_the_loop:
                gather(batch)
        gather(torch.ones(2))

    with pytest.raises(ShapeMismatch) as caught:
        loop()
    assert gather(torch.tensor([rank])).tolist() == [0, 1]
    return str(caught.value)


@pytest.mark.parametrize("calls_in_the_loop", [False, True])
def test_a_process_that_leaves_the_loop_alone_is_named(two: Processes, calls_in_the_loop: bool) -> None:
    first, second = two.run(leaves_early, calls_in_the_loop, timeout=250)
    assert first == second
    assert re.search(r"gather\(\) at \S*test_stream_sharding.py:\d+ on rank 0", first), first
    assert re.search(r"DataLoader.__next__\(\) at \S*test_stream_sharding.py:\d+ on rank 1", first), first


def distributed_sampler(shuffle: bool) -> list[list[int]]:
    state = PartialState(cpu=True)
    data = range(10)
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=state.process_index, shuffle=shuffle)  # type: ignore[arg-type]
    loader: Any = prepare_data_loader(DataLoader(data, batch_size=2, sampler=sampler))  # type: ignore[arg-type]
    loader.set_epoch(3)
    return [batch.tolist() for batch in loader]


def test_indices_that_the_script_divided_are_not_divided_again(two: Processes) -> None:
    assert two.run(distributed_sampler, False) == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [9]]]
    shuffled = two.run(distributed_sampler, True)
    assert sorted(index for process in shuffled for batch in process for index in batch) == list(range(10))


def divided_by_the_script(length: int, batch_size: int | None, drop_last: bool) -> list[list[int]]:
    from accel_ops import gather

    state = PartialState(cpu=True)
    data: Any = range(length)

    def prepared() -> Any:
        sampler: Any = DistributedSampler(data, 2, state.process_index, shuffle=False, drop_last=drop_last)
        return prepare_data_loader(DataLoader(data, batch_size, sampler=sampler), restore_position=True)

    def kept(loader: Any) -> list[list[int]]:
        return [drop_padding(gather(torch.as_tensor(b)), loader.progress.padding).view(-1).tolist() for b in loader]

    loader = prepared()
    whole = kept(loader)
    for steps in range(1, len(whole)):
        assert kept(skip_first_batches(prepared(), steps)) == whole[steps:]
    return whole


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [None, 1, 2, 3])
def test_samples_that_a_sampler_of_the_script_repeats_are_left_out_of_metrics(
    two: Processes, batch_size: int | None, drop_last: bool
) -> None:
    for length in (1, 2, 5, 7, 8) if not drop_last else (2, 5, 8):
        whole, same = two.run(divided_by_the_script, length, batch_size, drop_last)
        assert whole == same
        seen = sorted(index for step in whole for index in step)
        assert seen == list(range(length - length % 2 if drop_last else length))


def resumed(workers: int) -> list[tuple[Any, Any]]:
    PartialState(cpu=True)
    results = []
    for by_hand, steps in product((False, True), (1, 2, 4)):

        def prepared(by_hand: bool = by_hand) -> Any:
            plain = DataLoader(Files(range(11), range(100, 107)), batch_size=3, num_workers=workers)
            return prepare_data_loader(plain, restore_position=not by_hand)

        loader = prepared()
        list(loader)
        rest, saved = [], None
        for number, batch in enumerate(loader, 1):
            if number > steps:
                rest.append(batch.tolist())
            if number == steps:
                saved = loader.state_dict()
        again = prepared()
        again.load_state_dict(saved)
        results.append((rest, [b.tolist() for b in (skip_first_batches(again, steps) if by_hand else again)]))
    return results


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_rest_of_an_epoch_of_own_streams(two: Processes, workers: int) -> None:
    first, second = two.run(resumed, workers)
    assert len(first[0][0]) == 3
    for expected, after in first + second:
        assert after == expected


@pytest.mark.parametrize("processes", [2, 3])
def test_a_number_of_shards_that_does_not_divide_evenly_is_left_to_dispatching(processes: int) -> None:
    whole = Files(*[range(3)] * 4)
    assert shards_itself(whole, processes, "auto") == (processes == 2)
    assert not shards_itself(whole, processes, "dispatch")
    assert shards_itself(whole, processes, "already")
    assert own_shard(whole, processes, 1, "already") is whole


def test_a_function_divides_streams_only() -> None:
    with fresh(), pytest.raises(Conflict, match="map-style data set"):
        prepare_data_loader(DataLoader(range(3)), sharding=lambda data, count, at: data)


def hugging_face() -> tuple[str, list[list[int]]]:
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    state = PartialState(cpu=True)
    seen = []
    for divided in (False, True):
        whole = Dataset.from_dict({"x": list(range(12))}).to_iterable_dataset(num_shards=4).with_format("torch")
        stream = split_dataset_by_node(whole, state.process_index, 2) if divided else whole
        loader: Any = prepare_data_loader(DataLoader(stream, batch_size=2), put_on_device=True)
        seen.append([int(index) for batch in loader for index in batch["x"]])
    assert sorted(seen[0]) == sorted(set(seen[0]))
    three = Dataset.from_dict({"x": list(range(12))}).to_iterable_dataset(num_shards=3)
    left: Any = prepare_data_loader(DataLoader(three, batch_size=2), put_on_device=True)
    return type(left).__name__, seen


def test_hugging_face_streams(two: Processes) -> None:
    pytest.importorskip("datasets", reason="divides streams of Hugging Face datasets, an optional library")
    (kind, first), (_, second) = two.run(hugging_face)
    assert kind == DataLoaderDispatcher.__name__
    for mine, theirs in zip(first, second, strict=True):
        assert sorted(mine + theirs) == list(range(12))
        assert len(mine) == len(theirs) == 6


def test_hugging_face_data_sets_with_indices() -> None:
    datasets = pytest.importorskip("datasets", reason="reads data sets of Hugging Face, an optional library")
    with fresh():
        data = datasets.Dataset.from_dict({"x": list(range(7))}).with_format("torch")
        seen = []
        for process in range(2):
            loader = prepare_data_loader(DataLoader(data, batch_size=2), num_processes=2, process_index=process)
            seen += [batch["x"].tolist() for batch in loader]
        assert seen == [[0, 1], [4, 5], [2, 3], [6, 0]]
        assert torch.is_tensor(next(iter(loader))["x"])
