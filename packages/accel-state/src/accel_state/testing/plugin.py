"""Fixtures and a mark for pytest: processes, clean state, devices. Use it with `pytest -p accel_state.testing.plugin`.

    def rank():
        return PartialState().process_index

    def test_each_process_has_a_rank(two):
        assert two.run(rank) == [0, 1]

The processes of a group start when the first test of a module calls them, and end with that module. None of the
fixtures acts on a test that does not ask for it; a module in which every test needs a clean state says so once:

    pytestmark = pytest.mark.usefixtures("fresh_state")

Garbage collections during the tests spare what was there before the first of them.

A test with the mark `cuda` needs GPUs and is skipped where there are too few. The mark says in one line what is
different on a GPU: `@pytest.mark.cuda(differs="reductions add up in another order")`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from accel_state.process import PartialState
from accel_state.testing.fresh import fresh
from accel_state.testing.kinds_of_devices import GPU_PROCESSES, SIMULATED, working_on
from accel_state.testing.processes import Processes

__all__ = ("cpu_state", "device", "four", "fresh_state", "gpus", "one", "processes", "three", "two")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line(
        "markers",
        "cuda(differs, gpus=1): needs so many NVIDIA GPUs; `differs` says what is different on them",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """See that each mark says what is different on a GPU."""
    silent = [item.nodeid for item in items for mark in item.iter_markers("cuda") if not mark.kwargs.get("differs")]
    if silent:
        raise pytest.UsageError(
            f"The mark `cuda` of {', '.join(silent)} does not say what is different on a GPU. "
            f'Write @pytest.mark.cuda(differs="...").'
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs more GPUs than there are."""
    needed = max((mark.kwargs.get("gpus", 1) for mark in item.iter_markers("cuda")), default=0)
    if needed and needed > _gpus_here():
        pytest.skip(f"needs {needed} NVIDIA GPU{'s' if needed > 1 else ''}, and there are {_gpus_here()}")


def _gpus_here() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


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


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The device that a test of `on_devices` works on, in a clean state."""
    if request.param == SIMULATED:
        from accel_state.testing.simulated_device import POSSIBLE

        if not POSSIBLE:
            pytest.skip("this torch cannot have the simulated device here")
    with fresh(), working_on(request.param):
        yield torch.device("cpu") if request.param == "cpu" else torch.device(request.param, 0)


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


@pytest.fixture(scope="module")
def gpus(processes: Callable[[int], Processes]) -> Processes:
    """As many processes as the variable GPU_PROCESSES says, for tests that give each process a GPU; one without it."""
    return processes(GPU_PROCESSES)
