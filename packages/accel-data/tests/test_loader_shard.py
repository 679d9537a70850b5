"""Iterating a prepared loader: what it gives, what it knows of its end, and whom it tells."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from accel_data import DataLoaderShard, prepare_data_loader, skip_first_batches
from accel_state import GradientState
from accel_state.errors import DataError, SettingError, UnknownKind
from accel_testing.streams import Stream

pytestmark = pytest.mark.usefixtures("fresh_state")


Pair = namedtuple("Pair", ["pixels", "label"])


class Numbers(Dataset[Any]):
    """Samples that are their index, in a nesting."""

    def __init__(self, length: int, kind: str = "tensor") -> None:
        self.items = list(range(length))
        self.kind = kind

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        value = torch.tensor(float(self.items[index]))
        return {
            "tensor": value,
            "dict": {"x": value, "deep": [value, {"y": value}]},
            "named": Pair(value, index),
        }[self.kind]


class Carrying(DataLoader[Any]):
    """A user's loader with something of its own."""

    def hello(self) -> str:
        return "hello"


def lists(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("length", [1, 3, 8, 10])
def test_the_end_is_known_with_the_last_batch(length: int) -> None:
    loader: Any = prepare_data_loader(DataLoader(range(length), batch_size=2), num_processes=2, process_index=0)
    gradient, seen = GradientState(), []
    for _ in loader:
        assert gradient.active_dataloader is loader
        assert gradient.end_of_dataloader == loader.end_of_dataloader == loader.progress.end_of_dataloader
        assert gradient.remainder == loader.remainder == length % 4
        seen.append(loader.end_of_dataloader)
    assert seen == [False] * (len(loader) - 1) + [True]
    assert not gradient.in_dataloader
    assert gradient.remainder == -1


def test_a_loader_inside_another_does_not_disturb_it() -> None:
    outer: Any = prepare_data_loader(DataLoader(range(6), batch_size=2))
    inner: Any = prepare_data_loader(DataLoader(range(5), batch_size=1))
    gradient, ends = GradientState(), []
    for _ in outer:
        for _ in inner:
            assert gradient.active_dataloader is inner
        assert gradient.active_dataloader is outer
        ends.append(gradient.end_of_dataloader)
    assert ends == [False, False, True]


def test_leaving_in_the_middle_leaves_iteration() -> None:
    loader: Any = prepare_data_loader(DataLoader(range(6), batch_size=2))
    for _ in loader:
        break
    assert not GradientState().in_dataloader
    assert loader.iteration == 0
    assert lists(loader) == [[0, 1], [2, 3], [4, 5]]
    assert loader.iteration == 1


def test_two_iterations_of_one_loader_at_once() -> None:
    loader = prepare_data_loader(DataLoader(range(6), batch_size=2))
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)] == [
        ([0, 1], [0, 1]),
        ([2, 3], [2, 3]),
        ([4, 5], [4, 5]),
    ]
    assert not GradientState().in_dataloader


def test_progress_counts_what_was_received() -> None:
    loader: Any = prepare_data_loader(DataLoader(range(10), batch_size=2), num_processes=2, process_index=1)
    counted = [(loader.progress.steps, loader.progress.samples) for _ in loader]
    assert counted == [(1, 4), (2, 8), (3, 10)]
    assert (loader.progress.epoch, loader.progress.steps, loader.progress.samples) == (1, 0, 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["tensor", "dict", "named"])
def test_any_nesting_arrives_on_the_device(kind: str, workers: int) -> None:
    plain = DataLoader(Numbers(5, kind), batch_size=2, num_workers=workers)
    loader = prepare_data_loader(plain, put_on_device=True, device=torch.device("meta"))
    leaf = {"tensor": lambda it: it, "dict": lambda it: it["deep"][1]["y"], "named": lambda it: it.pixels}[kind]
    for batch in loader:
        assert leaf(batch).device.type == "meta"
        if kind == "named":
            assert type(batch) is Pair
    assert len(list(prepare_data_loader(plain))) == 3


def test_batches_stay_where_they_are_without_a_device() -> None:
    batches = list(prepare_data_loader(DataLoader(Numbers(4), batch_size=2)))
    assert [batch.device.type for batch in batches] == ["cpu", "cpu"]


class Broken(Numbers):
    def __getitem__(self, index: int) -> Any:
        raise RuntimeError("corrupt record")


def test_an_error_of_the_data_set_stays_its_own() -> None:
    with pytest.raises(RuntimeError, match="corrupt record") as caught:
        list(prepare_data_loader(DataLoader(Broken(4))))
    assert not isinstance(caught.value, DataError)


def test_a_prepared_loader_is_a_loader_with_all_that_the_plain_one_has() -> None:
    plain = Carrying(Numbers(7), batch_size=2, timeout=0, drop_last=True)
    loader: Any = prepare_data_loader(plain)
    assert isinstance(loader, DataLoader)
    assert loader.dataset is plain.dataset
    assert loader.collate_fn is plain.collate_fn
    assert loader.hello() == "hello"
    assert loader.multiprocessing_context is None
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (2, True, 0)
    assert loader.total_batch_size == 2
    assert loader.total_dataset_length == 7
    assert len(loader) == 3
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = loader.nothing_of_the_kind


def test_what_is_set_on_a_prepared_loader_reaches_the_one_that_reads() -> None:
    loader: Any = prepare_data_loader(DataLoader(Numbers(4), batch_size=2))
    loader.collate_fn = len
    assert list(loader) == [2, 2]
    loader.own_note = "kept"
    assert loader.own_note == "kept"


def test_the_plain_loader_stays_as_it_was() -> None:
    plain = DataLoader(Numbers(9), batch_size=2, shuffle=True)
    before = plain.batch_sampler, plain.sampler
    prepare_data_loader(plain, num_processes=2, process_index=0, use_seedable_sampler=True)
    prepare_data_loader(plain, num_processes=2, process_index=0)
    assert (plain.batch_sampler, plain.sampler) == before
    assert plain.sampler.generator is None  # type: ignore[union-attr]


def test_copies_and_pickles_give_the_same() -> None:
    loader: Any = prepare_data_loader(DataLoader(range(6), batch_size=2))
    list(loader)
    for other in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(other) is DataLoaderShard
        assert lists(other) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("length", [5, 6])
def test_loaders_without_batching_give_single_samples(length: int) -> None:
    plain = DataLoader(Numbers(length), batch_size=None)
    loaders: list[Any] = [prepare_data_loader(plain, num_processes=2, process_index=process) for process in range(2)]
    given = [[int(sample) for sample in loader] for loader in loaders]
    assert given == [[0, 2, 4], [1, 3, 0 if length == 5 else 5]]
    padding = loaders[0].progress.padding
    assert (padding.of(0), padding.of(1)) == (None, 0) if length == 5 else padding is None


def test_a_single_process_shuffles_as_torch_does() -> None:
    torch.manual_seed(4)
    expected = lists(DataLoader(range(9), batch_size=2, shuffle=True)), torch.rand(1).item()
    torch.manual_seed(4)
    loader = prepare_data_loader(DataLoader(range(9), batch_size=2, shuffle=True))
    assert (lists(loader), torch.rand(1).item()) == expected


@pytest.mark.parametrize("replacement", [False, True])
def test_a_seeded_epoch_has_as_many_samples_as_the_sampler_of_the_script_draws(replacement: bool) -> None:
    sampler = RandomSampler(range(9), replacement, num_samples=5)
    loader = prepare_data_loader(DataLoader(range(9), batch_size=2, sampler=sampler), use_seedable_sampler=True)
    assert [len(batch) for batch in lists(loader)] == [2, 2, 1]


def test_workers_that_stay_give_every_epoch() -> None:
    plain = DataLoader(range(7), batch_size=2, num_workers=2, persistent_workers=True)
    loader = prepare_data_loader(plain)
    for _ in range(3):
        assert lists(loader) == [[0, 1], [2, 3], [4, 5], [6]]


def test_the_sampler_below_can_be_read_and_replaced() -> None:
    loader: Any = prepare_data_loader(DataLoader(range(4), batch_size=2, shuffle=True))
    assert loader.get_sampler() is loader.batch_sampler.sampler
    loader.set_sampler([3, 2, 1, 0])
    assert lists(loader) == [[3, 2], [1, 0]]


def test_the_sampler_of_a_loader_without_batches_can_be_read_and_replaced() -> None:
    sampler = RandomSampler(range(4))
    loader: Any = prepare_data_loader(DataLoader(range(4), batch_size=None, sampler=sampler))
    assert loader.get_sampler() is sampler
    loader.set_sampler([3, 2, 1, 0])
    assert [int(sample) for sample in loader] == [3, 2, 1, 0]


def test_the_sampler_of_a_stream_cannot_be_replaced() -> None:
    loader: Any = prepare_data_loader(DataLoader(Stream(4), batch_size=2))
    with pytest.raises(DataError, match="no sampler of indices"):
        loader.set_sampler([3, 2, 1, 0])


def test_loader_shard_made_directly_does_not_divide_its_sampler() -> None:
    loader = DataLoaderShard(range(6), batch_sampler=BatchSampler(range(5), 2, False), skip_batches=1, iteration=4)
    assert lists(loader) == [[2, 3], [4]]
    assert loader.iteration == 5
    assert [int(sample) for sample in DataLoaderShard(range(3), batch_size=None)] == [0, 1, 2]
    assert lists(DataLoaderShard(Stream(5), batch_size=2)) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_marks_what_filled_up_its_last_step_on_every_process(workers: int) -> None:
    for process, real in [(0, 4), (1, 1)]:
        plain = DataLoader(Stream(13), batch_size=4, num_workers=workers)
        loader: Any = prepare_data_loader(plain, num_processes=2, process_index=process)
        marks = [loader.progress.padding for _ in loader]
        readers = max(workers, 1)
        assert [mark and mark.of(process) for mark in marks] == [None] * readers + [real] * readers
        assert loader.remainder == 5


def test_a_stream_that_does_not_batch_marks_single_samples() -> None:
    loader: Any = prepare_data_loader(DataLoader(Stream(3), batch_size=None), num_processes=2, process_index=1)
    marks = [(int(sample), loader.progress.padding and loader.progress.padding.of(1)) for sample in loader]
    assert marks == [(1, None), (0, 0)]


@pytest.mark.parametrize("what", [[1, 2], "text", None, torch.zeros(3)])
def test_only_loaders_can_be_prepared(what: Any) -> None:
    with pytest.raises(UnknownKind, match="DataLoader"):
        prepare_data_loader(what)


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    for plain in (DataLoader(range(10), batch_size=3), DataLoader(range(10), batch_size=None), DataLoader(Stream(3))):
        with pytest.raises(SettingError, match="multiple of 2"):
            prepare_data_loader(plain, num_processes=2, process_index=0, split_batches=True)


def test_a_process_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SettingError, match="no such process"):
        prepare_data_loader(DataLoader(range(10)), num_processes=2, process_index=2)
    with pytest.raises(SettingError, match="no such process"):
        prepare_data_loader(DataLoader(range(10)), num_processes=0)


def test_a_prepared_loader_is_not_prepared_again() -> None:
    loader = prepare_data_loader(DataLoader(range(10)))
    assert prepare_data_loader(loader) is loader


def test_gradient_state_of_its_own_accelerator() -> None:
    from accel_state import GradientAccumulationPlugin

    own = GradientState.of(GradientAccumulationPlugin(num_steps=2))
    GradientState.of(GradientAccumulationPlugin(num_steps=3))
    loader = prepare_data_loader(DataLoader(range(4), batch_size=2), gradient=own)
    for _ in loader:
        assert own.in_dataloader
        assert not GradientState().in_dataloader


class Whole(Dataset[Any]):
    """A data set that gives whole batches for lists of indices."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, indices: Any) -> Any:
        return indices


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_sampler_that_gives_whole_batches_is_divided_as_a_batch_sampler(even: bool, shuffle: bool) -> None:
    def part(index: int, as_sampler: bool) -> Any:
        generator = torch.Generator().manual_seed(2)
        order = RandomSampler(range(22), generator=generator) if shuffle else SequentialSampler(range(22))
        batches = BatchSampler(order, 4, False)
        if as_sampler:
            plain = DataLoader(Whole(), sampler=batches, batch_size=None, collate_fn=torch.tensor)
        else:
            plain = DataLoader(range(22), batch_sampler=batches)
        return prepare_data_loader(plain, num_processes=2, process_index=index, even_batches=even)

    for index in range(2):
        loader, expected = part(index, True), part(index, False)
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in expected]
        assert (len(loader), loader.total_batch_size) == (3, 8)
        assert type(loader.get_sampler()) is type(expected.get_sampler())
        rest = skip_first_batches(part(index, True), 1)
        assert [batch.tolist() for batch in rest] == [
            batch.tolist() for batch in skip_first_batches(part(index, False), 1)
        ]
        loader.set_sampler(SequentialSampler(range(9)))
        assert len(loader) == (2 if even or index == 0 else 1)
