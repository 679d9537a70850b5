"""A schedule goes on as in a run of as many processes as the replicas have together."""

from __future__ import annotations

import pytest

pytest.importorskip("torchft")

import torch

from accel_torch import Accelerator


@pytest.mark.parametrize("backend", ["torchft", "torchft-diloco"])
def test_a_step_of_four_replicas_moves_a_schedule_by_four(
    fresh_state: None, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://127.0.0.1:1")
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "4")
    accelerator = Accelerator(cpu=True, backend=backend)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.5)
    model, prepared, scheduler = accelerator.prepare(model, optimizer, schedule)
    optimizer.step()
    rates = []
    for _ in range(4):
        scheduler.step()
        rates.append(prepared.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.5, 0.25]
