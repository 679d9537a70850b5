"""A model that is prepared before its optimizer is made, as scripts for sharded training do it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from accel_state.errors import Conflict
from accel_testing.processes import Processes
from accel_torch import Accelerator, FullyShardedDataParallelPlugin


def model_of() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return model(inputs).square().mean()


def plain_losses(steps: int) -> list[float]:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of_a_model_prepared_first(plugin: FullyShardedDataParallelPlugin, again: bool, folder: str) -> list[float]:
    """Losses of three steps, and of two more after a checkpoint of the first three is loaded."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = accelerator.prepare(model_of())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if again:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
    losses = []
    for step in (0, 1, 2, None, 3, 4):
        if step is None:
            accelerator.save_state(folder)
            accelerator.backward(loss_of(model, 9))
            optimizer.step()
            optimizer.zero_grad()
            accelerator.load_state(folder)
            continue
        loss = loss_of(model, step)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("again", [True, False], ids=["with the model again", "by itself"])
@pytest.mark.parametrize(
    "plugin",
    [
        FullyShardedDataParallelPlugin(2),
        FullyShardedDataParallelPlugin(1, use_orig_params=True),
        FullyShardedDataParallelPlugin(1, use_orig_params=False),
    ],
    ids=["version 2", "version 1", "version 1 with joined parameters"],
)
def test_an_optimizer_of_a_sharded_model_trains_and_is_saved(
    two: Processes, plugin: FullyShardedDataParallelPlugin, again: bool, tmp_path: Path
) -> None:
    for losses in two.run(losses_of_a_model_prepared_first, plugin, again, str(tmp_path)):
        assert losses == pytest.approx(plain_losses(5), rel=1e-5)


def refusal_of_an_optimizer_made_first() -> str:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(2))
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.prepare(model)
    with pytest.raises(Conflict) as caught:
        accelerator.prepare(optimizer)
    return str(caught.value)


def test_an_optimizer_that_was_made_before_its_model_was_sharded_is_refused(two: Processes) -> None:
    for message in two.run(refusal_of_an_optimizer_made_first):
        assert "create one for each model that prepare() returned" in message
