"""Runs that save by themselves: on all processes at the same step, and so that they can be continued."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accel_plugins.checkpoint.retention import checkpoints
from accel_testing.fresh import fresh
from accel_testing.processes import Processes
from accel_torch import Accelerator, ContinuousSavePolicy, DataLoaderConfiguration, ProjectConfiguration


class Counter:
    """What a script counts by itself."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def run(
    folder: str, until: int, accumulation: int = 1, saves: int = 3, pause: float = 0.0
) -> tuple[int, float, list[int]]:
    """Train from the newest checkpoint on, until some steps were made and some checkpoints saved.

    Returns:
        The step that it began with, the sum of the weights at step `until`, and the steps of all checkpoints.
    """
    policy = ContinuousSavePolicy(max_overhead=1.0, keep_last=100)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulation,
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, save_policy=policy),
        dataloader_config=DataLoaderConfiguration(restore_position=True),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 1))
    data = TensorDataset(torch.arange(48.0).reshape(16, 3) / 48)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=2, shuffle=True)
    )
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    accelerator.load_state(missing_ok=True)
    first, weights, patience = counter.steps, 0.0, time.monotonic() + 250
    saved = Path(folder) / "checkpoints"
    for _ in range(loader.iteration, 100_000):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                counter.steps += 1
                if counter.steps == until:
                    weights = float(sum(parameter.detach().double().sum() for parameter in model.parameters()))
            time.sleep(pause)
        enough = counter.steps >= until and len(checkpoints(saved)) >= saves
        flag = torch.tensor(float(enough or time.monotonic() > patience))
        if float(accelerator.reduce(flag)) == accelerator.num_processes:
            break
    accelerator.end_training()
    steps = [steps_of(checkpoint.path) for checkpoint in checkpoints(saved)]
    return first, weights, steps


def steps_of(path: Path) -> int:
    state: Any = torch.load(path / "custom_checkpoint_0.pkl")
    return int(state["steps"])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_saves_by_itself_and_continues_where_it_was(tmp_path: Path, accumulation: int) -> None:
    with fresh():
        _, straight, steps = run(str(tmp_path / "one"), 60, accumulation)
    assert len(steps) >= 3
    assert steps == sorted(set(steps))
    assert all((tmp_path / "one" / "checkpoints" / f"checkpoint_{number}").is_dir() for number in range(len(steps)))
    with fresh():
        _, _, before = run(str(tmp_path / "two"), 20, accumulation, 1)
    with fresh():
        first, resumed, _ = run(str(tmp_path / "two"), 60, accumulation, 1)
    assert first == before[-1]
    if first < 60:
        assert resumed == straight


def test_all_processes_save_at_the_same_step(two: Processes, tmp_path: Path) -> None:
    outcomes = two.run(run, str(tmp_path), 30, 1, 3, 0.005)
    assert outcomes[0] == outcomes[1]
    _, _, steps = outcomes[0]
    assert len(steps) >= 3
    first, _, _ = two.run(run, str(tmp_path), 1)[0]
    assert first == steps[-1]
