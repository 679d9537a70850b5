"""Fixtures for pytest: groups of real processes, and a clean state. Use it with `pytest -p accel_state.testing.plugin`.

    def rank():
        return PartialState().process_index

    def test_each_process_has_a_rank(two):
        assert two.run(rank) == [0, 1]

The processes of a group start when the first test of a module calls them, and end with that module. None of the
fixtures acts on a test that does not ask for it; a module in which every test needs a clean state says so once:

    pytestmark = pytest.mark.usefixtures("fresh_state")

Garbage collections during the tests spare what was there before the first of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from accel_state.process import PartialState
from accel_state.testing.fresh import fresh
from accel_state.testing.processes import Processes

__all__ = ("cpu_state", "four", "fresh_state", "one", "processes", "three", "two")


def pytest_collection_finish() -> None:
    """Keep collections short: torch and thousands of tests are objects by the million, none of which ever goes."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh_state() -> Iterator[None]:
    """A test as in a new process, which leaves environment and state as they were; see `accel_state.testing.fresh`."""
    with fresh():
        yield


@pytest.fixture
def cpu_state(fresh_state: None) -> PartialState:
    """The state of a single process on the CPU, in an environment as in a new process."""
    return PartialState(cpu=True)


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[[int], Processes]]:
    """Gives the group of as many processes as it is called with; the tests of a module share it.

    Example:
        def test_ranks(processes):
            assert processes(3).run(rank) == [0, 1, 2]
    """
    groups: dict[int, Processes] = {}
    with ExitStack() as stack:

        def group(count: int) -> Processes:
            if count not in groups:
                groups[count] = stack.enter_context(Processes(count))
            return groups[count]

        yield group


@pytest.fixture(scope="module")
def one(processes: Callable[[int], Processes]) -> Processes:
    """One process, apart from that of the tests."""
    return processes(1)


@pytest.fixture(scope="module")
def two(processes: Callable[[int], Processes]) -> Processes:
    """Two processes."""
    return processes(2)


@pytest.fixture(scope="module")
def three(processes: Callable[[int], Processes]) -> Processes:
    """Three processes."""
    return processes(3)


@pytest.fixture(scope="module")
def four(processes: Callable[[int], Processes]) -> Processes:
    """Four processes."""
    return processes(4)
