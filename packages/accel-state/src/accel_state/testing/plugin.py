"""Fixtures for pytest: groups of real processes. Use it with `pytest -p accel_state.testing.plugin`.

    def rank():
        return PartialState().process_index

    def test_each_process_has_a_rank(two):
        assert two.run(rank) == [0, 1]

The processes of a group start when the first test of a module calls them, and end with that module.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accel_state.testing.processes import Processes

__all__ = ("four", "one", "two")


@pytest.fixture(scope="module")
def one() -> Iterator[Processes]:
    """One process, apart from that of the tests."""
    with Processes(1) as group:
        yield group


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    """Two processes."""
    with Processes(2) as group:
        yield group


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    """Four processes."""
    with Processes(4) as group:
        yield group
