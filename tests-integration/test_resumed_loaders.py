"""A training run under accumulation, continued in the middle of a window, with loaders read in every way."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accel_testing.processes import Processes
from accel_torch import Accelerator, DataLoaderConfiguration

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")


class Augmented(Dataset[torch.Tensor]):
    """Samples with a random part, which is the same in every run because samples are seeded."""

    def __len__(self) -> int:
        return 44

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 44, random.random(), float(torch.rand(())), 1.0])


class Run:
    """One start of a training script."""

    def __init__(self, how: dict[str, Any], seed: int) -> None:
        torch.manual_seed(0)
        loading = DataLoaderConfiguration(
            use_seedable_sampler=how["seedable"],
            data_seed=5 if how["seedable"] else None,
            dispatch_batches=how["dispatch"],
            use_stateful_dataloader=how["stateful"],
            seed_samples=True,
        )
        self.accelerator = Accelerator(cpu=True, dataloader_config=loading, gradient_accumulation_steps=4)
        torch.manual_seed(seed)
        random.seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        plain = DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=how["workers"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, plain)

    def train(self, batches: Any, save: dict[int, Path] | None = None) -> list[float]:
        losses = []
        for number, batch in enumerate(batches, 1):
            with self.accelerator.accumulate(self.model):
                loss = self.model(batch).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
            if save and number in save:
                self.accelerator.save_state(str(save[number]))
        return losses

    def weights(self) -> list[Any]:
        return [parameter.detach().tolist() for parameter in self.model.parameters()]


def resumed(cases: list[dict[str, Any]], folder: str) -> list[str]:
    wrong = []
    for number, how in enumerate(cases):
        places = {steps: Path(folder) / f"{number}-{steps}" for steps in (1, 3, 4)}
        run = Run(how, seed=1)
        run.train(run.loader)
        expected = run.train(run.loader, places)
        following, weights = run.train(run.loader), run.weights()
        for steps, place in places.items():
            again = Run(how, seed=steps + 7)
            again.accelerator.load_state(str(place))
            by_hand = not how["stateful"]
            current = again.accelerator.skip_first_batches(again.loader, steps) if by_hand else again.loader
            if again.train(current) != expected[steps:]:
                wrong.append(f"{how} after {steps}: the rest of the epoch")
            if again.train(again.loader) != following or again.weights() != weights:
                wrong.append(f"{how} after {steps}: the next epoch")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("stateful", [False, True])
def test_losses_and_weights_are_those_of_the_run_that_went_on(two: Processes, tmp_path: Path, stateful: bool) -> None:
    if stateful:
        pytest.importorskip("torchdata", reason="wraps the loader of torchdata, an optional library")
    names = ("seedable", "dispatch", "workers")
    values = product((False, True), (None, True), (0, 1))
    cases = [dict(zip(names, found, strict=True)) | {"stateful": stateful} for found in values]
    assert two.run(resumed, cases, str(tmp_path), timeout=250) == [[], []]
