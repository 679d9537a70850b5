"""Positions that the original library saved.

The files in `original_states` are the `dl_state_dict.bin` of checkpoints that the original wrote after three batches of
two samples out of 21, with `use_stateful_dataloader=True`; its main process writes one for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accel_data import DataLoaderAdapter, prepare_data_loader
from accel_state.errors import CheckpointError, NotOffered
from accel_testing.processes import Processes

stateful_dataloader = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="wraps the loader of torchdata, an optional library"
)

pytestmark = [pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning"), pytest.mark.usefixtures("fresh_state")]

SAVED = Path(__file__).parent / "original_states"


class Counting(IterableDataset[int]):
    """A stream that can tell its position, and counts what it was asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.at = 0
        self.resumes = False
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"i": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["i"]
        self.resumes = True

    def __iter__(self) -> Iterator[int]:
        if not self.resumes:
            self.at = 0
        self.resumes = False
        while self.at < self.length:
            self.at += 1
            self.given += 1
            yield self.at - 1


def saved(name: str) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(SAVED / f"{name}.bin", weights_only=True)
    return state


def prepared(plain: Any, processes: int = 1, index: int = 0, **options: Any) -> Any:
    options = {"use_stateful_dataloader": True, **options}
    return prepare_data_loader(plain, num_processes=processes, process_index=index, **options)


def rest_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def test_a_state_of_one_process_is_loaded() -> None:
    loader = prepared(DataLoader(range(21), batch_size=2))
    loader.load_state_dict(saved("one_process_indices"))
    assert rest_of(loader) == [[6, 7], [8, 9], [10, 11], [12, 13], [14, 15], [16, 17], [18, 19], [20]]
    assert rest_of(loader)[0] == [0, 1]


@pytest.mark.parametrize("name", ["two_processes_indices", "two_processes_workers"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_of_two_processes_is_loaded(name: str, workers: int) -> None:
    rests = []
    for index in range(2):
        loader = prepared(DataLoader(range(21), batch_size=2, num_workers=workers), 2, index)
        loader.load_state_dict(saved(name))
        rests.append(rest_of(loader))
    assert rests == [[[12, 13], [16, 17], [20, 0]], [[14, 15], [18, 19], [1, 2]]]


def test_the_order_of_a_seedable_sampler_is_the_originals() -> None:
    rests = []
    for index in range(2):
        plain = DataLoader(range(21), batch_size=2, shuffle=True)
        loader = prepared(plain, 2, index, use_seedable_sampler=True, data_seed=7)
        loader.set_epoch(1)
        loader.load_state_dict(saved("two_processes_seedable"))
        rests.append(rest_of(loader))
    assert rests == [[[1, 17], [4, 3], [19, 15]], [[10, 12], [13, 5], [9, 2]]]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_with_a_state_of_its_own(workers: int) -> None:
    stream = Counting(21)
    loader = prepared(DataLoader(stream, batch_size=2, num_workers=workers))
    loader.load_state_dict(saved("one_process_stream" + ("_workers" if workers else "")))
    assert rest_of(loader)[:2] == [[6, 7], [8, 9]]
    assert stream.given == (0 if workers else 15)


def test_an_epoch_that_is_over_begins_the_next_one() -> None:
    loader = prepared(DataLoader(range(21), batch_size=2))
    loader.load_state_dict(saved("one_process_finished"))
    assert len(rest_of(loader)) == 11


@pytest.mark.parametrize("name", ["one_process_indices", "one_process_shuffled", "two_processes_indices"])
def test_whoever_does_not_restore_begins_the_epoch(name: str) -> None:
    loader = prepared(DataLoader(range(21), batch_size=2, shuffle=True), use_stateful_dataloader=False)
    loader.load_state_dict(saved(name))
    assert len(rest_of(loader)) == 11


def test_what_an_epoch_was_drawn_from_cannot_be_guessed() -> None:
    loader = prepared(DataLoader(range(21), batch_size=2, shuffle=True))
    with pytest.raises(CheckpointError, match="does not contain the random state of the order of"):
        loader.load_state_dict(saved("one_process_shuffled"))


def dispatched() -> str:
    from accel_state import PartialState

    PartialState(cpu=True)
    loader: Any = prepare_data_loader(
        DataLoader(range(21), batch_size=2), dispatch_batches=True, use_stateful_dataloader=True
    )
    with pytest.raises(CheckpointError) as caught:
        loader.load_state_dict(saved("two_processes_dispatched"))
    return str(caught.value)


def test_what_the_originals_main_process_read_ahead_is_not_taken_for_a_position(two: Processes) -> None:
    for text in two.run(dispatched):
        assert "had prefetched" in text


@pytest.mark.parametrize("state", [{}, {"epoch": 3, "model": {}}])
def test_what_is_no_state_of_a_loader_is_refused(state: dict[str, Any]) -> None:
    loader = prepared(DataLoader(range(21), batch_size=2))
    with pytest.raises(CheckpointError, match="It is not the state of a loader"):
        loader.load_state_dict(state)


def test_an_adapter_shows_the_position_of_the_loader_it_holds() -> None:
    adapter = DataLoaderAdapter(range(8), use_stateful_dataloader=True, batch_size=2)
    batches = iter(adapter.base_dataloader)
    next(batches)
    state = adapter.state_dict()
    assert state is adapter.dl_state_dict
    other = DataLoaderAdapter(range(8), use_stateful_dataloader=True, batch_size=2)
    other.load_state_dict(state)
    assert rest_of(other.base_dataloader) == [[2, 3], [4, 5], [6, 7]]


def test_an_adapter_around_a_plain_loader_knows_no_position() -> None:
    adapter = DataLoaderAdapter(range(8), batch_size=2)
    for call in (adapter.state_dict, lambda: adapter.load_state_dict({})):
        with pytest.raises(NotOffered, match="use_stateful_dataloader=True"):
            call()


class Noted(DataLoaderAdapter):
    def adjust_state_dict_for_prefetch(self) -> None:
        self.dl_state_dict["noted"] = True


def test_a_subclass_may_adjust_the_state() -> None:
    assert Noted(range(4), use_stateful_dataloader=True).state_dict()["noted"]
    loader = prepared(DataLoader(range(6), batch_size=2))
    loader.adjust_state_dict_for_prefetch()
    assert loader.state_dict() == loader.dl_state_dict
