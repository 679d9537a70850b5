"""An epoch of a loader over indices is easy to follow: few modules of ours run in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_data import DataLoaderConfiguration, prepare_data_loader
from accel_testing.profiling import count_calls, profile

pytestmark = pytest.mark.usefixtures("fresh_state")


def modules_run_by(work: Callable[[], object]) -> set[str]:
    """The modules of our packages in which a function runs during `work`."""
    seen: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("accel") and name != profile.__module__:
            seen.add(name)

    with profile(look):
        work()
    return seen


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("processes", "length"), [(1, 8), (2, 8), (2, 9)], ids=["one", "even", "padded"])
def test_an_epoch_runs_in_five_modules_of_the_package(shuffle: bool, processes: int, length: int) -> None:
    plain: DataLoader[Any] = DataLoader(torch.arange(length), batch_size=2, shuffle=shuffle)  # type: ignore[arg-type]
    loader = prepare_data_loader(
        plain, num_processes=processes, process_index=0, put_on_device=True, use_seedable_sampler=True
    )
    batches: list[Any] = []
    found = modules_run_by(lambda: batches.extend(loader))
    assert len(batches) == -(-length // (2 * processes))
    assert len([name for name in found if name.startswith("accel_data.")]) <= 5, sorted(found)
    assert len(found) <= 6, sorted(found)
    # The test sees what it counts.
    assert "accel_data.loader" in found
    assert modules_run_by(DataLoaderConfiguration) == {"accel_data.config"}


def calls_per_batch(loader: Iterable[Any]) -> float:
    """How many functions, Python's and C's, run for a batch in the middle of an epoch."""
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    return count_calls(lambda: [next(batches) for _ in range(20)]) / 20


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("leaves", "most"), [(1, 2), (8, 4)], ids=["a tensor", "a dict of 8"])
def test_a_prepared_loader_adds_few_calls_to_a_batch(shuffle: bool, leaves: int, most: int) -> None:
    tensors = {str(index): torch.zeros(2) for index in range(leaves)}
    batch: Any = tensors["0"] if leaves == 1 else tensors

    def plain() -> DataLoader[Any]:
        return DataLoader(range(40), batch_size=1, collate_fn=lambda _: batch, shuffle=shuffle)  # type: ignore[arg-type]

    prepared = prepare_data_loader(plain(), put_on_device=True, device=torch.device("cpu"))
    added = calls_per_batch(prepared) - calls_per_batch(plain())
    # Converting a block of shuffled indices is a call for many batches.
    assert added <= most + 0.5 * shuffle
