"""How many requests `save_state` of real processes makes to the store of the run."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_state.testing.processes import Processes
from accel_state.transport.control import ControlStore
from accel_torch import Accelerator, ProjectConfiguration

OURS = ("MainThread", "accel-save")
"""Threads that save; others of a process report where it is."""


def requests_on_two(folder: str, remote: bool) -> dict[str, int]:
    """The requests of this rank for one save of each kind, after one that nobody counts."""
    made: Counter[str] = Counter()
    request, delete = ControlStore._request, ControlStore.delete

    def counted(self: ControlStore, *given: Any) -> Any:
        if threading.current_thread().name in OURS:
            made["requests"] += 1
        return request(self, *given)

    def deleted(self: ControlStore, keys: Iterable[str], timeout: float) -> None:
        gone = list(keys)
        if threading.current_thread().name in OURS:
            made["requests"] += len(gone) - 1
        delete(self, gone, timeout)

    place = (Path(folder) / "remote").as_uri() if remote else None
    accelerator = Accelerator(
        cpu=True, project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, remote=place)
    )
    model, optimizer = accelerator.prepare(model := nn.Linear(3, 1), torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 3)).sum())
    optimizer.step()
    accelerator.save_state()
    ControlStore._request, ControlStore.delete = counted, deleted  # type: ignore[method-assign, assignment]
    try:
        found = {}
        for kind in ("now", "behind"):
            made.clear()
            accelerator.save_state(async_save=kind == "behind")
            accelerator.wait_for_checkpoint()
            found[kind] = made["requests"]
    finally:
        ControlStore._request, ControlStore.delete = request, delete  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("remote", [False, True])
def test_a_save_takes_few_requests_to_the_store_of_the_run(two: Processes, tmp_path: Path, remote: bool) -> None:
    first, second = two.run(requests_on_two, str(tmp_path), remote)
    assert 0 < second["now"] <= 12
    assert 0 < second["behind"] <= 12
    assert 0 < first["now"] <= 3 * 2 + 20
    assert 0 < first["behind"] <= 4 * 2 + 23
