"""A checkpoint without optimizer states of parameters that had no gradient is loaded and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_testing.processes import Processes
from accel_torch import Accelerator, FullyShardedDataParallelPlugin, ProjectConfiguration

SAVED_AFTER, STEPS = 2, 5


class Routed(nn.Module):
    """An expert that is used later, and a head that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.expert, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor, routed: bool) -> torch.Tensor:
        outputs: torch.Tensor = self.body(inputs).tanh()
        return self.expert(outputs) if routed else outputs


def run(folder: str, version: int, kind: str, resume: bool) -> list[float]:
    """The losses after the checkpoint, in a run that goes on or in one that resumes from it."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        state_dict_type=kind,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=["Linear"],
    )
    project = ProjectConfiguration(fsync=False)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, project_config=project)
    torch.manual_seed(3)
    model: Any = Routed()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    losses = []
    if resume:
        accelerator.load_state(folder)
    for step in range(SAVED_AFTER if resume else 0, STEPS):
        generator = torch.Generator().manual_seed(100 * step + accelerator.process_index)
        loss = model(torch.randn(3, 6, generator=generator), step > SAVED_AFTER).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == SAVED_AFTER and not resume:
            accelerator.save_state(folder)
    return losses[-(STEPS - SAVED_AFTER) :]


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_parameter_that_had_no_gradient_starts_afresh(
    two: Processes, tmp_path: Path, version: int, kind: str
) -> None:
    straight = two.run(run, str(tmp_path / "a"), version, kind, False)
    resumed = two.run(run, str(tmp_path / "a"), version, kind, True)
    assert resumed == straight
