"""A check that fails on one process fails on all, with the failure of its own where a process has one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel_plugins.checkpoint.agreement import agreed
from accel_state import PartialState
from accel_state.errors import CheckpointError
from accel_state.testing.fresh import fresh
from accel_state.testing.processes import Processes


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2) as group:
        yield group


def looked(failing: tuple[int, ...]) -> str:
    rank = PartialState(cpu=True).process_index

    def look() -> str:
        if rank in failing:
            raise CheckpointError(f"File {rank} was to be read.", "It is damaged.", "Load another.")
        return f"file {rank}"

    try:
        return agreed(look)
    except CheckpointError as error:
        return str(error).splitlines()[0]


def test_what_fails_on_one_process_fails_on_all(two: Processes) -> None:
    assert two.run(looked, ()) == ["file 0", "file 1"]
    assert two.run(looked, (1,)) == ["File 1 was to be read."] * 2
    assert two.run(looked, (0, 1)) == ["File 0 was to be read.", "File 1 was to be read."]


def test_what_is_found_may_be_nothing() -> None:
    with fresh():
        PartialState(cpu=True)
        assert agreed(lambda: None) is None
