"""How many Python functions of ours a prepared step calls, with what a launch turns on: a call more is felt."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_testing.profiling import profile
from accel_torch import Accelerator

STEPS = 40

pytestmark = pytest.mark.usefixtures("fresh_state")


def calls_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, accumulation: int) -> Counter[str]:
    """Calls, and resumptions of generators, in an epoch of a run that has begun."""
    monkeypatch.setenv("ACCEL_STATUS_FOLDER", str(tmp_path))
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulation,
        goodput=True,
        project_dir=tmp_path,
    )
    plain = torch.nn.Linear(8, 1)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1.0)
    data = TensorDataset(torch.randn(STEPS, 8), torch.randn(STEPS, 1))
    model, optimizer, scheduler, loader = accelerator.prepare(plain, sgd, schedule, DataLoader(data, batch_size=1))

    def epoch() -> None:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("accel_") and module != profile.__module__:
            calls[f"{module}.{frame.f_code.co_name}"] += 1

    # The guard against misuse watches the first steps.
    for _ in range(3):
        epoch()
    with profile(note):
        epoch()
    return calls


@pytest.mark.parametrize(("precision", "accumulation", "most"), [("no", 1, 13), ("no", 4, 12), ("bf16", 1, 14)])
def test_a_step_calls_few_functions_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, accumulation: int, most: int
) -> None:
    calls = calls_of_ours(tmp_path, monkeypatch, precision, accumulation)
    each = {name: count // STEPS for name, count in calls.items() if count >= STEPS}
    # What does not happen at each step is a quarter of the calls at most: where an epoch begins and ends.
    assert sum(each.values()) <= most, each
    assert sum(calls.values()) < (most + 5) * STEPS, calls
