"""What saves of real processes take: requests to the store of the run, and nothing that grows with their number."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_state.transport.control import ControlStore
from accel_testing.processes import Processes
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
    assert 0 < first["behind"] <= 3 * 2 + 20


def soaked(folder: str, saves: int) -> list[tuple[int, int, int, int]]:
    """Open files, threads, keys in the store and resident memory in MB, after a tenth of the saves and after all."""
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2, fsync=False),
    )
    model, optimizer = accelerator.prepare(model := nn.Linear(64, 64), torch.optim.AdamW(model.parameters()))
    store: Any = accelerator.state._process.transport.store()
    found = []
    for turn in range(1, saves + 1):
        accelerator.backward(model(torch.ones(2, 64)).sum())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(async_save=turn % 2 == 0)
        if turn in (saves // 10, saves):
            accelerator.wait_for_checkpoint()
            accelerator.wait_for_everyone()
            resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
            names = sorted(thread.name for thread in threading.enumerate())
            found.append((len(os.listdir("/proc/self/fd")), len(names), store.num_keys(), resident >> 20))
            accelerator.wait_for_everyone()
    return found


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="counts what Linux shows in /proc")
@pytest.mark.parametrize("saves", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_files_threads_keys_and_memory_do_not_grow_with_saves(two: Processes, tmp_path: Path, saves: int) -> None:
    for early, late in two.run(soaked, str(tmp_path), saves, timeout=3 * saves):
        assert late[0] <= early[0] + 1
        assert late[1] <= early[1] + 1
        # The report of a hang keeps the newest calls of each rank.
        assert late[2] <= early[2] + 2
        assert late[3] <= early[3] + 32
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
