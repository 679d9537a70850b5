"""Reading through torchdata's StatefulDataLoader."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_data import prepare_data_loader
from accel_state.errors import CheckpointError
from accel_state.testing.fresh import fresh

stateful_dataloader = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="wraps the loader of torchdata, an optional library"
)

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with fresh():
        yield


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


def prepared(plain: DataLoader[Any], processes: int = 1) -> Any:
    return prepare_data_loader(
        plain, num_processes=processes, process_index=processes - 1, use_stateful_dataloader=True
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
def test_indices(processes: int, workers: int, shuffle: bool) -> None:
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


def test_without_torchdata_a_stream_that_only_has_a_state_cannot_be_continued() -> None:
    def make() -> Any:
        return prepare_data_loader(DataLoader(Counting(11), batch_size=2), restore_position=True)

    loader = make()
    next(iter(loader))
    with pytest.raises(CheckpointError, match="use_stateful_dataloader"):
        make().load_state_dict(loader.state_dict())


def test_the_state_can_be_saved_and_loaded_without_pickled_classes(tmp_path: Any) -> None:
    loader = prepared(DataLoader(range(9), batch_size=2, shuffle=True))
    batches = iter(loader)
    next(batches)
    torch.save(loader.state_dict(), tmp_path / "state.bin")
    rest = [batch.tolist() for batch in batches]
    other = prepared(DataLoader(range(9), batch_size=2, shuffle=True))
    other.load_state_dict(torch.load(tmp_path / "state.bin", weights_only=True))
    assert [batch.tolist() for batch in other] == rest
