"""A checkpoint that was written from a device is read where there is only a CPU, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_testing.plugin import on_devices, working_on
from accel_testing.processes import Processes
from accel_torch import Accelerator

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}


def run(folder: str, kind: str, load: bool) -> dict[str, Any]:
    """Train two steps and save, or load and train on; what the state is then."""
    with working_on(kind):
        accelerator = Accelerator(mixed_precision="fp16")
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        if load:
            # The state of a generator of the CPU does not fit that of a device.
            accelerator.load_state(folder, load_kwargs={"allow_missing": ("random_states",)})
        else:
            for _ in range(2):
                accelerator.backward(model(torch.ones(4, 8, device=accelerator.device)).square().sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.save_state(folder)
        state = {name: value.detach().cpu().tolist() for name, value in accelerator.get_state_dict(model).items()}
        moments = [
            value.detach().cpu().tolist()
            for slot in optimizer.optimizer.state_dict()["state"].values()
            for value in slot.values()
        ]
        places = {value.device.type for value in accelerator.unwrap_model(model).state_dict().values()}
        rates = scheduler.get_last_lr()
        assert accelerator.scaler is not None
        return {"state": state, "moments": moments, "rates": rates, "scale": accelerator.scaler.get_scale()} | (
            {"places": places} if load else {}
        )


@on_devices("cpu", "simulated", differs="weights, moments and generators are in memory that the reader has not")
def test_what_a_device_wrote_a_cpu_reads(device: torch.device, one: Processes, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    (written,) = one.run(run, folder, device.type, False)
    with Processes(1) as reader:
        (read,) = reader.run(run, folder, "cpu", True, environment=HIDDEN)
    assert read.pop("places") == {"cpu"}
    assert read == written


@on_devices("cpu", "simulated", differs="what is read on the host is copied to the device before it is used")
def test_what_a_cpu_wrote_a_device_reads(device: torch.device, one: Processes, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    (written,) = one.run(run, folder, "cpu", False)
    (read,) = one.run(run, folder, device.type, True)
    assert read.pop("places") == {device.type}
    assert read == written
