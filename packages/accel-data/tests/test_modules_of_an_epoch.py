"""An epoch of a loader over indices is easy to follow: few modules of ours run in it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel_data import DataLoaderConfiguration, prepare_data_loader

pytestmark = pytest.mark.usefixtures("fresh_state")


def modules_run_by(work: Callable[[], object]) -> set[str]:
    """The modules of our packages in which a function runs during `work`."""
    seen: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("accel"):
            seen.add(name)

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("processes", "length"), [(1, 8), (2, 8), (2, 9)], ids=["one", "even", "padded"])
def test_an_epoch_of_a_loader_over_indices_runs_in_six_modules(shuffle: bool, processes: int, length: int) -> None:
    plain: DataLoader[Any] = DataLoader(torch.arange(length), batch_size=2, shuffle=shuffle)  # type: ignore[arg-type]
    loader = prepare_data_loader(
        plain, num_processes=processes, process_index=0, put_on_device=True, use_seedable_sampler=True
    )
    batches: list[Any] = []
    found = modules_run_by(lambda: batches.extend(loader))
    assert len(batches) == -(-length // (2 * processes))
    assert len(found) <= 6, sorted(found)
    # The test sees what it counts.
    assert "accel_data.loader" in found
    assert modules_run_by(DataLoaderConfiguration) == {"accel_data.config"}
