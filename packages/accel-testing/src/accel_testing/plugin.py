"""Fixtures and a mark for pytest: processes, clean state, devices. Load it with `pytest -p accel_testing.plugin`.

    def rank():
        return PartialState().process_index

    def test_each_process_has_a_rank(two):
        assert two.run(rank) == [0, 1]

The processes of a group start when the first test of a module calls them, and end with that module. No fixture affects
a test that does not request it. A module in which every test needs a clean state requests it once:

    pytestmark = pytest.mark.usefixtures("fresh_state")

Garbage collections during the tests skip the objects that existed before the first test.

A test with the mark `cuda` needs GPUs and is skipped if there are too few. The mark states in one line what is
different on a GPU: `@pytest.mark.cuda(differs="reductions add up in another order")`. `on_devices` runs one test body
on a GPU, and on the CPU or the simulated device if there is no GPU:

    @on_devices("cpu", "simulated", differs="kernels run on a stream, after their call has returned")
    def test_sums(device):
        assert torch.ones(3, device=device).sum().item() == 3

Functions that other processes call use the test's type of device inside `working_on(device.type)`.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import pytest
import torch

from accel_state.devices.select import family_of
from accel_state.process import PartialState
from accel_state.settings.environ import publish
from accel_testing.fresh import fresh
from accel_testing.processes import Processes

__all__ = (
    "GPU_PROCESSES",
    "SIMULATED",
    "cpu_state",
    "device",
    "four",
    "fresh_state",
    "gpus",
    "new_python",
    "on_devices",
    "one",
    "preloaded_python",
    "processes",
    "room_for",
    "three",
    "two",
    "working_on",
)


SIMULATED: Final = "simulated"
"""The device type that is simulated in CPU memory; see `accel_testing.simulated_device`."""

GPU_PROCESSES: Final = int(os.environ.get("GPU_PROCESSES", "1"))
"""Number of processes in tests that give each process a GPU."""


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line(
        "markers",
        "cuda(differs, gpus=1): needs that many NVIDIA GPUs; `differs` states what is different on them",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise for a mark that does not state what is different on a GPU."""
    silent = [item.nodeid for item in items for mark in item.iter_markers("cuda") if not mark.kwargs.get("differs")]
    if silent:
        raise pytest.UsageError(
            f"The mark `cuda` of {', '.join(silent)} does not state what is different on a GPU. "
            f'Write @pytest.mark.cuda(differs="...").'
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs more GPUs than this machine has."""
    needed = max((mark.kwargs.get("gpus", 1) for mark in item.iter_markers("cuda")), default=0)
    if needed and needed > _gpus_here():
        pytest.skip(f"needs {needed} NVIDIA GPU{'s' if needed > 1 else ''}, and there are {_gpus_here()}")


def _gpus_here() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_finish() -> None:
    """Keep garbage collections short: torch and thousands of tests are millions of objects that stay alive."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh_state() -> Iterator[None]:
    """Run the test as in a new process, and restore environment and state; see `accel_testing.fresh`."""
    with fresh():
        yield


@pytest.fixture
def cpu_state(fresh_state: None) -> PartialState:
    """The state of a single process on the CPU, with the environment of a new process."""
    return PartialState(cpu=True)


def on_devices(*others: str, differs: str, gpus: int = 1) -> Any:
    """Decorator: run a test on a CUDA device and on others; the fixture `device` passes the device to the test.

    Args:
        others: "cpu", "simulated" or both, if the test is meaningful there.
        differs: what is different on a GPU, in one line.
        gpus: number of GPUs that the test needs.
    """
    if SIMULATED in others:
        # It must be registered with torch before the first backward pass of this process.
        import accel_testing.simulated_device  # noqa: F401
    cuda = pytest.param("cuda", marks=pytest.mark.cuda(differs=differs, gpus=gpus))
    return pytest.mark.parametrize("device", [*others, cuda], indirect=True)


@contextmanager
def working_on(kind: str, memory: int = 2**30) -> Iterator[None]:
    """Make a state that is created inside the block use this device type.

    Args:
        kind: "cpu", "simulated" or "cuda".
        memory: memory of the simulated device in bytes.
    """
    if kind == SIMULATED:
        from accel_testing.simulated_device import simulated_device

        with simulated_device(memory=memory):
            yield
        return
    if kind == "cpu":
        publish({"ACCELERATE_USE_CPU": "true"})
    yield


@contextmanager
def room_for(device: torch.device, size: int) -> Iterator[None]:
    """Limit the free memory of a device for this process to `size` bytes, inside the block."""
    family = family_of(device)
    limit = getattr(family.module, "set_per_process_memory_fraction", None)
    if limit is None:
        held = torch.empty(family.free_memory() - size, dtype=torch.uint8, device=device)
        yield
        del held
        return
    family.empty_cache()
    limit((family.module.memory_reserved(device) + size) / family.total_memory(device.index), device)
    try:
        yield
    finally:
        limit(1.0, device)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The device of a test with `on_devices`, in a clean state."""
    if request.param == SIMULATED:
        from accel_testing.simulated_device import POSSIBLE

        if not POSSIBLE:
            pytest.skip("this torch cannot have the simulated device here")
    with fresh(), working_on(request.param):
        yield torch.device("cpu") if request.param == "cpu" else torch.device(request.param, 0)


@pytest.fixture(scope="module")
def processes() -> Iterator[Callable[[int], Processes]]:
    """A function that returns a group of the given number of processes; the tests of a module share the groups.

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
def preloaded_python(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the scripts of a module's tests in processes that have imported torch.

    They have also imported the modules that the variable PRELOADED of the test's module names.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    from accel_testing.preloaded import PreloadedPython

    with PreloadedPython(getattr(request.module, "PRELOADED", ())):
        yield


@pytest.fixture
def new_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the scripts of a test in new interpreters, in a module whose other tests use `preloaded_python`."""
    monkeypatch.delenv("PRELOADED_PYTHON", raising=False)


@pytest.fixture(scope="module")
def one(processes: Callable[[int], Processes]) -> Processes:
    """One process in addition to that of the tests."""
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
    """Processes with one GPU each; the variable GPU_PROCESSES sets their number, by default one."""
    return processes(GPU_PROCESSES)
