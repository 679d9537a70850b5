"""An epoch of a shuffled mixture goes on from its checkpoints, whatever the numbers of processes and workers are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_data import MixtureDataset
from accel_ops import gather_object
from accel_testing.processes import Processes
from accel_torch import Accelerator, DataLoaderConfiguration

SAMPLES, BATCH = 61, 2


def mixture() -> MixtureDataset:
    sources = {"code": torch.arange(40.0), "text": torch.arange(100.0, 130.0), "web": torch.arange(200.0, 220.0)}
    weights = {"code": 0.5, "text": 0.3, "web": 0.2}
    return MixtureDataset(sources, weights, stop="repeat", num_samples=SAMPLES)


def train(folder: str, load: bool, batches: int | None, workers: int, accumulate: int) -> tuple[list[float], int]:
    """Ids of the samples of some batches in their global order, and the optimizer's steps; saves at the end."""
    loading = DataLoaderConfiguration(order="global", data_seed=3, even_batches=False, restore_position=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, dataloader_config=loading)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    loader = DataLoader(mixture(), batch_size=BATCH, num_workers=workers)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if load:
        accelerator.load_state(folder, allow_missing=("random_states",))
    mine, steps = [], 0
    for batch in loader:
        mine.append(batch.tolist())
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[:, None]).sum())
            optimizer.step()
            steps += accelerator.sync_gradients
            optimizer.zero_grad()
        if len(mine) == batches:
            break
    if batches is not None:
        accelerator.save_state(folder)
    everyones = gather_object([mine])
    return [one for step in zip_longest(*everyones, fillvalue=[]) for batch in step for one in batch], steps


PHASES = ((4, 4, 2, 2), (2, 6, 0, 1), (3, None, 1, 2))
"""Processes, batches before the save, workers and micro-batches of a step; each phase begins with a whole window."""


def test_ids_are_those_of_one_process_after_changes_of_processes_workers_and_accumulation(
    processes: Callable[[int], Processes], tmp_path: Path
) -> None:
    seen: list[float] = []
    for number, (count, batches, workers, accumulate) in enumerate(PHASES):
        answers = processes(count).run(train, str(tmp_path), number > 0, batches, workers, accumulate)
        assert len({tuple(ids) for ids, _ in answers}) == 1
        assert batches is None or {steps for _, steps in answers} == {batches // accumulate}
        seen += answers[0][0]
    assert seen == [float(sample) for sample in mixture()]
    assert len(set(seen)) == len(seen) == SAMPLES
