"""Reading through torchdata's StatefulDataLoader."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from accel_data import (
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from accel_data.seeding import SampleSeed, SeededSamples, SeededStream
from accel_state import PartialState
from accel_state.errors import Conflict
from accel_testing.processes import Processes
from accel_testing.streams import Stream

stateful_dataloader = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="wraps the loader of torchdata, an optional library"
)

pytestmark = [pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning"), pytest.mark.usefixtures("fresh_state")]


class Counting(IterableDataset[int]):
    """A stream that cannot be read through again: each run of it begins elsewhere, and only its state says where."""

    runs = 0

    def __init__(self, length: int) -> None:
        type(self).runs += 1
        self.start = 1000 * self.runs
        self.length = length
        self.at = 0
        self.resumes = False

    def state_dict(self) -> dict[str, int]:
        return {"start": self.start, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start, self.at = state["start"], state["at"]
        self.resumes = True

    def __iter__(self) -> Iterator[int]:
        if not self.resumes:
            self.at = 0
        self.resumes = False
        while self.at < self.length:
            self.at += 1
            yield self.start + self.at - 1


def prepared(plain: DataLoader[Any], processes: int = 1, **options: Any) -> Any:
    return prepare_data_loader(
        plain, num_processes=processes, process_index=processes - 1, use_stateful_dataloader=True, **options
    )


def rest_and_state(loader: Any, steps: int) -> tuple[list[Any], dict[str, Any]]:
    rest, saved = [], {}
    for number, batch in enumerate(loader, 1):
        if number > steps:
            rest.append(batch.tolist())
        if number == steps:
            saved = copy.deepcopy(loader.state_dict())
    return rest, saved


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_stateful_loaders_over_indices_resume(processes: int, workers: int, shuffle: bool) -> None:
    def make() -> Any:
        return prepared(DataLoader(range(13), batch_size=2, shuffle=shuffle, num_workers=workers), processes)

    loader = make()
    assert isinstance(loader.base_dataloader, stateful_dataloader.StatefulDataLoader)
    list(loader)
    for steps in (1, 3):
        rest, saved = rest_and_state(loader, steps)
        other = make()
        other.load_state_dict(saved)
        assert [batch.tolist() for batch in other] == rest
        if processes > 1 or not shuffle:
            assert [batch.tolist() for batch in other] == [batch.tolist() for batch in loader]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_goes_on_from_its_own_state(processes: int, workers: int) -> None:
    for steps in (1, 2):
        loader = prepared(DataLoader(Counting(11), batch_size=2, num_workers=workers), processes)
        list(loader)
        rest, saved = rest_and_state(loader, steps)
        other = prepared(DataLoader(Counting(11), batch_size=2, num_workers=workers), processes)
        other.load_state_dict(saved)
        resumed = [batch.tolist() for batch in other]
        # The last step of the second process is filled up from the beginning of a stream that begins elsewhere by now.
        compared = slice(None) if processes == 1 else slice(-1)
        assert resumed[compared] == rest[compared]
        assert len(resumed) == len(rest)


def test_a_loader_that_is_stateful_already_stays_the_users_own() -> None:
    plain = stateful_dataloader.StatefulDataLoader(range(6), batch_size=2)
    loader: Any = prepared(plain)
    assert type(loader.base_dataloader) is stateful_dataloader.StatefulDataLoader
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert plain.batch_sampler is not loader.batch_sampler


def test_without_torchdata_a_stream_that_only_has_a_state_is_refused() -> None:
    with pytest.raises(Conflict, match="use_stateful_dataloader"):
        prepare_data_loader(DataLoader(Counting(11), batch_size=2), restore_position=True)


def test_the_state_can_be_saved_and_loaded_without_pickled_classes(tmp_path: Any) -> None:
    loader = prepared(DataLoader(range(9), batch_size=2, shuffle=True))
    batches = iter(loader)
    next(batches)
    torch.save(loader.state_dict(), tmp_path / "state.bin")
    rest = [batch.tolist() for batch in batches]
    other = prepared(DataLoader(range(9), batch_size=2, shuffle=True))
    other.load_state_dict(torch.load(tmp_path / "state.bin", weights_only=True))
    assert [batch.tolist() for batch in other] == rest


class Remembering(Dataset[int]):
    """A data set with indices that also counts how often it was read, and goes back to that count."""

    def __init__(self) -> None:
        self.reads = 0

    def state_dict(self) -> dict[str, int]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.reads = state["reads"]

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return 100 * self.reads + index


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("seed_samples", [False, True])
def test_a_data_set_with_indices_and_a_state_of_its_own(
    processes: int, workers: int, shuffle: bool, seed_samples: bool
) -> None:
    def make() -> Any:
        plain = DataLoader(Remembering(), batch_size=2, shuffle=shuffle, num_workers=workers)
        return prepared(plain, processes, seed_samples=seed_samples, data_seed=1)

    loader = make()
    list(loader)
    for steps in (1, 2, 3):
        rest, saved = rest_and_state(loader, steps)
        padding = loader.progress.padding
        other = make()
        other.load_state_dict(saved)
        assert [batch.tolist() for batch in other] == rest
        assert other.progress.padding == padding


class ByEpoch(IterableDataset[int]):
    """A stream whose state holds its epoch, which `set_epoch` changes."""

    def __init__(self) -> None:
        self.epoch = self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.read = state["epoch"], state["read"]

    def __iter__(self) -> Iterator[int]:
        while self.read < 10:
            self.read += 1
            yield 100 * self.epoch + self.read
        self.read = 0


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_after_one_that_was_saved_at_its_end_is_another_one(processes: int, workers: int) -> None:
    def loader() -> Any:
        return prepared(DataLoader(ByEpoch(), 4, num_workers=workers), processes)

    straight = loader()
    epochs = [[batch.tolist() for batch in straight] for _ in range(3)]
    assert [epoch[0][0] // 100 for epoch in epochs] == [0, 1, 2]
    _, state = rest_and_state(loader(), len(epochs[0]))
    resumed = loader()
    resumed.load_state_dict(state)
    assert [[batch.tolist() for batch in resumed] for _ in range(3)] == [[], *epochs[1:]]


class Drawing(Counting):
    """A stream that draws a number for each sample."""

    def __iter__(self) -> Iterator[int]:
        return (1000 * sample + random.randrange(1000) for sample in super().__iter__())


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_with_seeded_samples_goes_on_with_the_draws_of_their_positions(processes: int, workers: int) -> None:
    def make() -> Any:
        plain = DataLoader(Drawing(24), batch_size=2, num_workers=workers)
        return prepared(plain, processes, seed_samples=True, data_seed=1)

    loader = make()
    list(loader)
    for steps in (1, 2, 3):
        rest, saved = rest_and_state(loader, steps)
        other = make()
        other.load_state_dict(saved)
        assert rest
        assert [batch.tolist() for batch in other] == rest
        saved_again = rest_and_state(other, 1)[1]
        assert saved_again["epoch"] == saved["epoch"] + 1


@pytest.mark.parametrize("wrapped", [SeededSamples.of(Remembering()), SeededStream.of(Counting(3), SampleSeed(1))])
def test_a_state_is_seen_by_those_who_do_not_ask_for_attributes_made_on_demand(wrapped: Any) -> None:
    # As `isinstance` with a protocol looks from Python 3.12 on.
    for name in ("state_dict", "load_state_dict"):
        assert callable(inspect.getattr_static(wrapped, name))
    assert not hasattr(SeededSamples.of(range(3)), "state_dict")
    assert not hasattr(SeededStream.of(range(3), SampleSeed(1)), "state_dict")


@pytest.mark.parametrize("data", [Counting, Remembering])
def test_a_second_interruption_after_skipping_by_hand(data: Any) -> None:
    def make() -> Any:
        whole = data(13) if data is Counting else data()
        return prepared(DataLoader(whole, batch_size=2))

    first = skip_first_batches(make(), 2)
    rest, saved = rest_and_state(first, 2)
    second = make()
    second.load_state_dict(saved)
    assert [batch.tolist() for batch in second] == rest
    assert len(rest) == 3


def dispatched() -> list[tuple[Any, Any]]:
    PartialState(cpu=True)
    results = []
    for kind, workers, split, steps in product(("stream", "remembering", "indices"), (0, 1), (False, True), (1, 2)):

        def make(kind: str = kind, workers: int = workers, split: bool = split) -> Any:
            data: Any = {"stream": Counting(16), "remembering": Remembering(), "indices": range(16)}[kind]
            plain = DataLoader(data, batch_size=4 if split else 2, num_workers=workers)
            return prepare_data_loader(
                plain, use_stateful_dataloader=True, dispatch_batches=True, put_on_device=True, split_batches=split
            )

        rest, saved = rest_and_state(make(), steps)
        other = make()
        other.load_state_dict(saved)
        results.append((rest, [batch.tolist() for batch in other]))
    return results


def test_the_main_process_goes_on_from_the_state_of_what_it_reads(two: Processes) -> None:
    for results in two.run(dispatched):
        for rest, resumed in results:
            assert resumed == rest
            assert len(rest) in (1, 2, 3)


class Walking(Counting):
    """Goes on where the reader before stopped, and begins again after its end."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.start = 1000

    def __iter__(self) -> Iterator[int]:
        self.resumes = True
        yield from super().__iter__()
        self.at = 0


def dispatched_to_the_end() -> list[Any]:
    """The epoch after one that was restored after its last step, with what an uninterrupted run gives in it."""
    PartialState(cpu=True)
    results = []
    for workers in (0, 1):

        def make(workers: int = workers) -> Any:
            plain = DataLoader(Walking(13), batch_size=2, num_workers=workers)
            return prepare_data_loader(plain, use_stateful_dataloader=True, dispatch_batches=True, put_on_device=True)

        loader = make()
        for _ in loader:
            saved = loader.state_dict()
        other = make()
        other.load_state_dict(saved)
        assert list(other) == []
        results.append([[batch.tolist() for batch in one] for one in (loader, other)])
    return results


def test_an_epoch_after_one_that_was_restored_at_its_end_is_complete(two: Processes) -> None:
    for results in two.run(dispatched_to_the_end):
        for expected, resumed in results:
            assert resumed == expected
            assert len(resumed) == 4


class Part(Counting):
    """One process's own part of a stream."""


def own_streams() -> list[tuple[Any, Any]]:
    rank = PartialState(cpu=True).process_index
    results = []
    for workers, steps in product((0, 1), (1, 2, 4)):

        def make(workers: int = workers) -> Any:
            plain = DataLoader(Part(5 if rank else 12), batch_size=2, num_workers=workers)
            return prepare_data_loader(plain, use_stateful_dataloader=True, sharding="already")

        rest, saved = rest_and_state(make(), steps)
        other = make()
        other.load_state_dict(saved)
        # What fills up a step comes from the beginning of a stream that begins elsewhere by now.
        marks = [other.progress.padding and other.progress.padding.of(rank) for _ in other]
        other = make()
        other.load_state_dict(saved)
        real = [batch.tolist()[:mark] for batch, mark in zip(other, marks, strict=True)]
        results.append(([batch[:mark] for batch, mark in zip(rest, marks, strict=True)], real))
    return results


def test_streams_that_each_process_reads_for_itself_go_on_from_their_states(two: Processes) -> None:
    first, second = two.run(own_streams)
    assert [len(rest) for rest, _ in first] == [5, 4, 2] * 2
    assert second[2][1] == [[], []]
    for rest, resumed in first + second:
        assert resumed == rest


DIRECT = (DataLoaderShard, DataLoaderDispatcher, SkipDataLoader)


def torchdatas_own(workers: int, shuffle: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {"batch_size": 4, "num_workers": workers, "shuffle": shuffle, "generator": generator}


@pytest.mark.parametrize("kind", DIRECT)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_made_directly_has_the_states_of_torchdatas_own(kind: Any, workers: int, shuffle: bool) -> None:
    data = list(range(14))
    theirs = stateful_dataloader.StatefulDataLoader(data, **torchdatas_own(workers, shuffle))
    ours = kind(data, use_stateful_dataloader=True, **torchdatas_own(workers, shuffle))
    compared = []
    for expected, batch, steps_left in zip(theirs, ours, (3, 2, 1), strict=False):
        compared.append(steps_left)
        assert batch.tolist() == expected.tolist()
        state, reference = copy.deepcopy(ours.state_dict()), copy.deepcopy(theirs.state_dict())
        torch.testing.assert_close(state, reference)
        rest = kind(data, use_stateful_dataloader=True, **torchdatas_own(workers, shuffle))
        rest.load_state_dict(reference)
        torch.testing.assert_close(rest.state_dict(), reference)
        continued = stateful_dataloader.StatefulDataLoader(data, **torchdatas_own(workers, shuffle))
        continued.load_state_dict(state)
        expected_rest = [left.tolist() for left in continued]
        assert [left.tolist() for left in rest] == expected_rest
        assert len(expected_rest) == steps_left
    assert compared == [3, 2, 1]


@pytest.mark.parametrize("kind", DIRECT)
def test_a_state_from_the_end_of_an_epoch_begins_the_next_one(kind: Any) -> None:
    loader = kind(list(range(6)), batch_size=2, use_stateful_dataloader=True)
    assert loader.state_dict()["_num_yielded"] == 0
    list(loader)
    state = loader.state_dict()
    assert state["_iterator_finished"]
    other = kind(list(range(6)), batch_size=2, use_stateful_dataloader=True)
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("kind", DIRECT)
@pytest.mark.parametrize("skip", [0, 1])
def test_batches_that_a_loader_made_directly_leaves_out(kind: Any, skip: int) -> None:
    loader = kind(list(range(8)), batch_size=2, use_stateful_dataloader=True, skip_batches=skip)
    assert len(loader) == 4 - skip
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]][skip:]
    later = skip_first_batches(loader, 1)
    assert [batch.tolist() for batch in later] == [[2, 3], [4, 5], [6, 7]][skip:]


class Scripts(DataLoader[Any]):
    """A loader class of a script."""


@pytest.mark.parametrize("kind", [*DIRECT, DataLoaderAdapter])
@pytest.mark.parametrize("stateful", [False, True])
def test_a_loader_is_an_instance_of_what_it_holds(kind: Any, stateful: bool) -> None:
    loader = kind(list(range(8)), batch_size=2, use_stateful_dataloader=stateful)
    assert isinstance(loader, stateful_dataloader.StatefulDataLoader) == stateful
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, kind)
    assert type(loader) is kind
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(other) is kind
        assert isinstance(other, stateful_dataloader.StatefulDataLoader) == stateful


def test_a_prepared_loader_is_an_instance_of_the_class_that_the_script_made() -> None:
    assert isinstance(prepare_data_loader(Scripts(range(4), batch_size=2)), Scripts)
    assert isinstance(prepared(Scripts(range(4), batch_size=2)), stateful_dataloader.StatefulDataLoader)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dispatch", [False, True])
def test_torchdatas_loader_continues_from_the_state_of_a_prepared_one(workers: int, dispatch: bool) -> None:
    plain = DataLoader(range(10), batch_size=2, num_workers=workers)
    rest, saved = rest_and_state(prepared(plain, dispatch_batches=dispatch), 2)
    theirs = stateful_dataloader.StatefulDataLoader(
        range(10), batch_sampler=BatchSampler(SequentialSampler(range(10)), 2, False), num_workers=workers
    )
    theirs.load_state_dict(saved)
    assert [batch.tolist() for batch in theirs] == rest
    assert len(rest) == 3


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_loader_of_torchdata_that_the_script_made_is_restored(shuffle: bool, processes: int) -> None:
    def make() -> Any:
        generator = torch.Generator().manual_seed(5)
        options = {"batch_size": 2, "shuffle": shuffle, "generator": generator}
        return prepared(stateful_dataloader.StatefulDataLoader(range(12), **options), processes)

    loader = make()
    list(loader)
    rest, saved = rest_and_state(loader, 2)
    assert saved["samples"] == 4 * processes
    other = make()
    other.load_state_dict(saved)
    assert [batch.tolist() for batch in other] == rest
    assert len(rest) == 6 // processes - 2


def test_a_sampler_without_a_state_is_restored_by_what_its_order_was_drawn_from() -> None:
    def make() -> Any:
        return DataLoaderShard(
            list(range(9)), batch_size=2, sampler=RandomSampler(range(9)), use_stateful_dataloader=True
        )

    rest, saved = rest_and_state(make(), 2)
    other = make()
    other.load_state_dict(saved)
    assert [batch.tolist() for batch in other] == rest


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_without_a_position_is_read_again_as_torchdata_does(processes: int, workers: int) -> None:
    def make() -> Any:
        with pytest.warns(UserWarning, match="Stream has no position.*read again"):
            return prepared(DataLoader(Stream(22), batch_size=2, num_workers=workers), processes)

    rest, saved = rest_and_state(make(), 3)
    other = make()
    other.load_state_dict(saved)
    assert [batch.tolist() for batch in other] == rest
    assert len(rest) == (8 if processes == 1 else 3)


class Positioned(IterableDataset[int]):
    """A stream that goes on where its loaded state says until the next epoch, also when it is read again."""

    def __init__(self, length: int) -> None:
        self.length, self.start, self.at = length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.start = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]

    def __iter__(self) -> Iterator[int]:
        for self.at in range(self.start, self.length):  # noqa: B020 - the state is that of the loop
            self.at += 1
            yield self.at


def resumed_unequal_streams() -> list[tuple[list[Any], list[Any]]]:
    state, compared = PartialState(cpu=True), []
    for steps in (1, 2, 3, 4):

        def loader() -> Any:
            plain = DataLoader(Positioned((4, 9)[state.process_index]), batch_size=2)
            return prepare_data_loader(plain, use_stateful_dataloader=True, sharding="already")

        rest, saved = rest_and_state(loader(), steps)
        other = loader()
        other.load_state_dict(saved)
        compared.append((rest, [batch.tolist() for batch in other]))
    return compared


def test_a_stream_that_ended_before_a_resume_repeats_its_last_batch(two: Processes) -> None:
    for compared in two.run(resumed_unequal_streams):
        for straight, resumed in compared:
            assert resumed == straight
