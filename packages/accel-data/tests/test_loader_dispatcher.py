"""The main process reads for all, on real processes."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accel_data import DataLoaderDispatcher, prepare_data_loader, skip_first_batches
from accel_ops import gather
from accel_state import GradientState, PartialState
from accel_state.errors import Conflict, DataError, SettingError, ShapeMismatch
from accel_testing.fresh import fresh
from accel_testing.processes import Processes

Pair = namedtuple("Pair", ["x", "name"])


class Stream(IterableDataset[int]):
    """Counts the samples that were read; fails at sample `fails_at`."""

    asked = 0

    def __init__(self, length: int, fails_at: int | None = None) -> None:
        self.length = length
        self.fails_at = fails_at

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            type(self).asked += 1
            if index == self.fails_at:
                raise ValueError("corrupt record")
            yield index


class Epochs(Stream):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(100 * self.epoch, 100 * self.epoch + self.length))


class Walking(Epochs):
    """Goes on where the reader before stopped, and begins again after its end."""

    read = 0

    def __iter__(self) -> Iterator[int]:
        while self.read < self.length:
            self.read += 1
            yield 100 * self.epoch + self.read
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class Mixed(Dataset[Any]):
    """Tensors, texts and numbers in a nesting."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        value = torch.full((2, 3), float(index))
        return {"pair": Pair(value, f"sample {index}"), "list": [value[0], index], "half": value[0, 0].bfloat16()}


class Ragged(Dataset[Any]):
    """Samples whose batches have different widths."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index // 2 + 1,), index)


def prepared(plain: DataLoader[Any], **options: Any) -> Any:
    options = {"dispatch_batches": True, "put_on_device": True, **options}
    return prepare_data_loader(plain, **options)


def run_case(length: int, stream: bool, split: bool, drop_last: bool, shuffle: bool, workers: int) -> dict[str, Any]:
    PartialState(cpu=True)
    torch.manual_seed(3)
    data: Any = Stream(length) if stream else range(length)
    how = {} if stream else {"shuffle": shuffle}
    loader = prepared(
        DataLoader(data, batch_size=4, drop_last=drop_last, num_workers=workers, **how), split_batches=split
    )
    batches, ends, kept = [], [], []
    for batch in loader:
        assert GradientState().end_of_dataloader == loader.end_of_dataloader
        padding = loader.progress.padding
        batches.append(batch.tolist())
        ends.append(loader.end_of_dataloader)
        kept.append(None if padding is None else [padding.of(0), padding.of(1)])
    return {"batches": batches, "ends": ends, "kept": kept, "remainder": loader.remainder}


def run_cases(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [run_case(*case) for case in cases]


CASES = [
    (length, stream, split, drop_last, shuffle, workers)
    for length, stream, split, drop_last, shuffle in product(
        (1, 3, 8, 13, 16), (True, False), (True, False), (True, False), (True, False)
    )
    for workers in ((0, 1) if length == 13 and not (shuffle or split) else (0,))
    if not (stream and shuffle) and not (drop_last and length == 1 and not stream)
]


def test_every_sample_once_in_the_order_of_one_process(two: Processes) -> None:
    for case, first, second in zip(CASES, *two.run(run_cases, CASES), strict=True):
        length, _, split, drop_last, shuffle, _ = case
        order = list(range(length))
        if shuffle:
            torch.manual_seed(3)
            order = [
                index for batch in DataLoader(range(length), batch_size=1, shuffle=True) for index in batch.tolist()
            ]
        step = 4 if split else 8
        dropped = length % step if drop_last else 0
        seen = []
        for mine, theirs, kept in zip(first["batches"], second["batches"], first["kept"], strict=True):
            assert len(mine) == len(theirs)
            real = kept or [len(mine), len(theirs)]
            seen += mine[: real[0]] + theirs[: real[1]]
        assert seen == order[: length - dropped], case
        steps = len(first["batches"])
        assert first["ends"] == second["ends"] == ([False] * (steps - 1) + [True] if steps else [])
        assert first["kept"] == second["kept"]


def test_the_last_step_is_padded_as_the_original_does(two: Processes) -> None:
    first, second = two.run(run_case, 13, True, False, False, False, 0)
    assert first["batches"] == [[0, 1, 2, 3], [8, 9, 10]]
    assert second["batches"] == [[4, 5, 6, 7], [11, 12, 0]]
    assert first["remainder"] == second["remainder"] == 5


def mixed(split: bool) -> list[Any]:
    PartialState(cpu=True)
    loader = prepared(DataLoader(Mixed(), batch_size=2), split_batches=split)
    return [
        (
            type(batch["pair"]).__name__,
            batch["pair"].x[:, 0, 0].tolist(),
            batch["pair"].name,
            batch["list"][1].tolist(),
            batch["half"].dtype,
        )
        for batch in loader
    ]


@pytest.mark.parametrize("split", [True, False])
def test_dispatcher_sends_nested_batches_with_texts(two: Processes, split: bool) -> None:
    first, second = two.run(mixed, split)
    for mine in (first, second):
        for kind, values, names, numbers, dtype in mine:
            assert kind == "Pair"
            assert list(names) == [f"sample {int(value)}" for value in values]
            assert numbers == [int(value) for value in values]
            assert dtype == torch.bfloat16
    assert [batch[3] for batch in first] == ([[0], [2], [4], [6]] if split else [[0, 1], [4, 5]])
    assert [batch[3] for batch in second] == ([[1], [3], [5], [0]] if split else [[2, 3], [6, 0]])


def ragged() -> list[Any]:
    PartialState(cpu=True)
    return [batch.tolist() for batch in prepared(DataLoader(Ragged(), batch_size=2))]


def test_batches_of_different_shapes_go_as_they_are(two: Processes) -> None:
    first, second = two.run(ragged)
    assert first == [[[0], [1]], [[4, 4, 4], [5, 5, 5]]]
    assert second == [[[2, 2], [3, 3]], [[6, 6, 6, 6], [7, 7, 7, 7]]]


def failing(at: int) -> tuple[list[Any], str, str]:
    PartialState(cpu=True)
    seen: list[Any] = []
    try:
        seen.extend(batch.tolist() for batch in prepared(DataLoader(Stream(24, fails_at=at), batch_size=2)))
    except (ValueError, DataError) as error:
        return seen, type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def test_an_error_of_the_main_process_reaches_all_at_the_same_step(two: Processes) -> None:
    for at in (0, 3, 9, 23):
        (mine, kind, text), (theirs, other_kind, other_text) = two.run(failing, at)
        assert len(mine) == len(theirs) == at // 4
        assert (kind, other_kind) == ("ValueError", "DataError")
        assert "corrupt record" in text
        assert "corrupt record" in other_text


def reading() -> tuple[int, int]:
    Stream.asked = 0
    PartialState(cpu=True)
    total = sum(len(batch) for batch in prepared(DataLoader(Stream(16), batch_size=2)))
    return Stream.asked, total


def test_only_the_main_process_reads(two: Processes) -> None:
    assert two.run(reading) == [(16, 8), (0, 8)]


def leaving() -> list[list[int]]:
    PartialState(cpu=True)
    loader = prepared(DataLoader(Stream(16), batch_size=2))
    for _ in loader:
        break
    assert not GradientState().in_dataloader
    return [batch.tolist() for batch in loader]


def test_leaving_in_the_middle_and_beginning_again(two: Processes) -> None:
    assert two.run(leaving)[1] == [[2, 3], [6, 7], [10, 11], [14, 15]]


def own_slices() -> list[list[int]]:
    PartialState(cpu=True)

    def every_other(batch: torch.Tensor, part: slice, process_index: int, num_processes: int) -> torch.Tensor:
        assert part.stop - part.start == len(batch) // num_processes
        return batch[process_index::num_processes]

    loader = prepared(DataLoader(Stream(8), batch_size=2), slice_fn_for_dispatch=every_other)
    return [batch.tolist() for batch in loader]


def test_a_function_may_cut_the_batch(two: Processes) -> None:
    assert two.run(own_slices) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def single_samples() -> list[Any]:
    PartialState(cpu=True)
    loader = prepared(DataLoader(Stream(5), batch_size=None))
    return [(int(sample), loader.progress.padding and loader.progress.padding.of(1)) for sample in loader]


def test_samples_that_are_not_batched(two: Processes) -> None:
    first, second = two.run(single_samples)
    assert [sample for sample, _ in first] == [0, 2, 4]
    assert second == [(1, None), (3, None), (0, 0)]


def counted_traffic() -> list[tuple[str, int]]:
    from accel_testing.recording_transport import recording

    PartialState(cpu=True)
    loader = prepared(DataLoader(torch.zeros(64, 1000), batch_size=8))  # type: ignore[arg-type]
    with recording() as records:
        list(loader)
    return [(record.operation, record.nbytes) for record in records if record.operation == "scatter"]


def test_each_step_is_one_message_with_one_part(two: Processes) -> None:
    sent, received = two.run(counted_traffic)
    # One of them ends the epoch.
    assert len(sent) == len(received) == 5
    part = 8 * 4000
    assert all(2 * part < nbytes < 2 * (part + 512) for _, nbytes in sent[:-1])
    assert sent[-1][1] < 2 * 512


def leaves_early(leaves: int) -> tuple[str, str]:
    """One process leaves the loop after a step and gathers; the others go on, and later iterate once more."""
    rank = PartialState(cpu=True).process_index
    loader = prepared(DataLoader(range(40), batch_size=4))  # type: ignore[arg-type]
    steps = iter(loader)
    next(steps)
    if rank == leaves:
        del steps
        with pytest.raises(ShapeMismatch) as caught:
            gather(torch.ones(2))
    else:
        with pytest.raises(ShapeMismatch) as caught:
            list(steps)
    assert gather(torch.tensor([rank])).tolist() == [0, 1]
    return str(caught.value), str([batch.tolist() for batch in loader][:1])


@pytest.mark.parametrize("leaves", [0, 1])
def test_a_process_that_leaves_the_loop_alone_is_named(two: Processes, leaves: int) -> None:
    (first, again), (second, again_too) = two.run(leaves_early, leaves, timeout=250)
    assert first == second
    assert re.search(rf"gather\(\) at \S*test_loader_dispatcher.py:\d+ on rank {leaves}", first), first
    assert re.search(rf"DataLoader.__next__\(\) at \S*test_loader_dispatcher.py:\d+ on rank {1 - leaves}", first), first
    assert (again, again_too) == ("[[0, 1, 2, 3]]", "[[4, 5, 6, 7]]")


def only_one_iterates() -> str:
    state = PartialState(cpu=True)
    loader = prepared(DataLoader(range(40), batch_size=4))  # type: ignore[arg-type]
    with pytest.raises(ShapeMismatch) as caught:
        list(loader) if state.is_main_process else state.wait_for_everyone()
    return str(caught.value)


def test_a_process_that_iterates_alone_is_named(two: Processes) -> None:
    (text,) = set(two.run(only_one_iterates, timeout=250))
    assert re.search(r"at \S*test_loader_dispatcher.py:\d+ on rank 0, wait_for_everyone\(\) at ", text), text


def resumed() -> list[tuple[Any, Any]]:
    PartialState(cpu=True)
    results = []
    for kind, split, by_hand, steps in product(("shuffle", "stream", "walking"), (False, True), (False, True), (1, 2)):
        torch.manual_seed(steps)

        def make(kind: str = kind, split: bool = split, by_hand: bool = by_hand) -> Any:
            data: Any = {"shuffle": range(21), "stream": Epochs(21), "walking": Walking(21)}[kind]
            plain = DataLoader(data, batch_size=4, shuffle=kind == "shuffle")
            return prepared(plain, split_batches=split, restore_position=not by_hand)

        loader = make()
        list(loader)
        rest, saved, generator = [], None, torch.empty(0)
        for number, batch in enumerate(loader, 1):
            if number > steps:
                rest.append(batch.tolist())
            if number == steps:
                saved, generator = loader.state_dict(), torch.get_rng_state()
        rest += [batch.tolist() for batch in loader]
        again = make()
        again.load_state_dict(saved)
        torch.set_rng_state(generator)
        first = skip_first_batches(again, steps) if by_hand else again
        results.append((rest, [batch.tolist() for batch in first] + [batch.tolist() for batch in again]))
    return results


def test_a_dispatched_epoch_goes_on_as_it_would_have(two: Processes) -> None:
    for results in two.run(resumed):
        assert results
        for expected, after in results:
            assert after == expected != []


def dying() -> None:
    import os

    rank = PartialState(cpu=True).process_index
    for _ in prepared(DataLoader(Stream(64), batch_size=2)):
        if rank == 0:
            os._exit(3)


def test_a_main_process_that_dies_leaves_nobody_waiting(two: Processes) -> None:
    first, second = two.outcomes(dying)
    assert first.exitcode == 3
    assert second.error is not None
    assert "CollectiveError" in second.error


@pytest.mark.parametrize("length", [1, 5, 8])
def test_dispatcher_on_one_process_gives_what_the_loader_gives(length: int) -> None:
    with fresh():
        loader = prepared(DataLoader(range(length), batch_size=2))
        assert type(loader) is DataLoaderDispatcher
        assert len(loader) == len(list(loader)) == -(-length // 2)
        ends = [loader.end_of_dataloader for _ in loader]
        assert ends == [False] * (len(ends) - 1) + [True]


def test_dispatcher_made_directly_skips_batches() -> None:
    with fresh():
        loader = DataLoaderDispatcher(range(6), batch_size=2, skip_batches=1, iteration=3)
        assert [batch.tolist() for batch in loader] == [[2, 3], [4, 5]]
        assert loader.iteration == 4


def test_what_cannot_be_dispatched_is_refused() -> None:
    with fresh():
        with pytest.raises(Conflict, match="Cannot dispatch to 2"):
            prepared(DataLoader(range(6)), num_processes=2, process_index=0)
        with pytest.raises(SettingError, match="one equal shard"):
            prepared(DataLoader(range(6), batch_size=None), split_batches=True)


def chosen() -> list[str]:
    PartialState(cpu=True)
    stream, data = DataLoader(Stream(4)), DataLoader(range(4))
    return [
        type(prepare_data_loader(stream, put_on_device=True)).__name__,
        type(prepare_data_loader(stream, put_on_device=True, dispatch_batches=False)).__name__,
        type(prepare_data_loader(stream)).__name__,
        type(prepare_data_loader(data, put_on_device=True)).__name__,
        type(prepare_data_loader(stream, sharding="dispatch")).__name__,
    ]


def test_streams_are_dispatched_by_default(two: Processes) -> None:
    shard, dispatcher = "DataLoaderShard", "DataLoaderDispatcher"
    assert two.run(chosen) == [[dispatcher, shard, shard, shard, dispatcher]] * 2
