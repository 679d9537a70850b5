"""Ranks as threads of one process: their states, their errors, and what is as before when they have ended."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from accel_state import PartialState, current
from accel_state.errors import SettingError
from accel_testing.fresh import fresh
from accel_testing.processes import ProcessesFailed
from accel_testing.threads import run_as_threads


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    with fresh():
        yield


def place() -> tuple[int, int, int, int]:
    state = PartialState(cpu=True)
    return state.process_index, state.num_processes, state.local_process_index, threading.get_ident()


def test_each_of_64_threads_is_a_rank_of_its_own() -> None:
    places = run_as_threads(64, place)
    assert [found[:3] for found in places] == [(rank, 64, rank) for rank in range(64)]
    assert len({found[3] for found in places}) == 64


def test_a_state_belongs_to_its_thread() -> None:
    before = PartialState(cpu=True)
    run_as_threads(3, place)
    assert before.num_processes == 1
    assert current.process_or_none() is not None


def test_barriers_and_main_process_first_between_threads() -> None:
    came: list[int] = []

    def first() -> int:
        state = PartialState(cpu=True)
        with state.main_process_first():
            came.append(state.process_index)
        state.wait_for_everyone()
        return len(came)

    assert run_as_threads(8, first) == [8] * 8
    assert came[0] == 0


def test_the_process_is_as_before_afterwards() -> None:
    hook, threads, environment = sys.excepthook, torch.get_num_threads(), dict(os.environ)
    run_as_threads(2, place)
    assert (sys.excepthook, torch.get_num_threads(), dict(os.environ)) == (hook, threads, environment)
    assert not dist.is_initialized()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_variables_of_a_launcher_do_not_reach_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "7", "LOCAL_RANK": "7", "WORLD_SIZE": "9"}.items():
        monkeypatch.setenv(name, value)
    assert [found[:3] for found in run_as_threads(2, place)] == [(0, 2, 0), (1, 2, 1)]
    assert os.environ["RANK"] == "7"


def one_fails() -> None:
    state = PartialState(cpu=True)
    if state.process_index == 2:
        raise ValueError("the disk is full")
    torch.distributed.barrier()


def test_the_error_of_a_rank_is_shown_and_the_others_end() -> None:
    with pytest.raises(ProcessesFailed, match=r"rank 2 raised(.|\n)*ValueError: the disk is full") as failed:
        run_as_threads(4, one_fails)
    waiting = {outcome.rank: outcome.error for outcome in failed.value.outcomes if outcome.rank != 2}
    assert set(waiting) == {0, 1, 3}
    assert all("waited for a rank that had failed" in str(error) for error in waiting.values())
    assert run_as_threads(2, place)[1][0] == 1


def one_stays_away() -> None:
    state = PartialState(cpu=True)
    if state.process_index != 1:
        state.wait_for_everyone()


def test_ranks_that_wait_too_long_are_shown_where_they_are() -> None:
    with pytest.raises(ProcessesFailed, match=r"was still busy(.|\n)*one_stays_away") as failed:
        run_as_threads(3, one_stays_away, timeout=3.0)
    assert [outcome.rank for outcome in failed.value.outcomes if outcome.hung] == [0, 2]
    assert run_as_threads(2, place)[0][0] == 0


def test_a_second_run_as_threads_at_the_same_time_is_refused() -> None:
    with pytest.raises(ProcessesFailed, match="NotReady: Cannot run 2 ranks as threads"):
        run_as_threads(2, run_as_threads, 2, place)
    with pytest.raises(SettingError, match="Cannot run 0 ranks"):
        run_as_threads(0, place)
