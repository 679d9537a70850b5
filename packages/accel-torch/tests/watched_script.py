"""A run that saves when it is asked to end, and trains until then."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accel_torch import Accelerator, ProjectConfiguration

folder = Path(sys.argv[1])
project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, save_on_signal=True)
accelerator = Accelerator(cpu=True, project_config=project)
model = torch.nn.Linear(2, 2)
data = DataLoader(TensorDataset(torch.randn(64, 2)), batch_size=4)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)

handler = logging.Handler()
handler.emit = lambda record: (folder / f"reported_{accelerator.process_index}").touch()  # type: ignore[method-assign]
logging.getLogger("accel_state.transport.control").addHandler(handler)


def mark(name: str, text: str = "") -> None:
    """Write a file of this process, which is there whole or not at all."""
    place = folder / f"{name}_{accelerator.process_index}"
    place.with_suffix(".new").write_text(text)
    place.with_suffix(".new").rename(place)


def train() -> None:
    steps_after_report = 0
    transport = accelerator.state._process.transport
    told = {"pid": os.getpid(), "port": os.environ["MASTER_PORT"], "scope": transport.scope}
    while True:
        for (batch,) in data:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            mark("place", json.dumps(told))
            steps_after_report += (folder / f"reported_{accelerator.process_index}").exists()
            if steps_after_report == 20:
                mark("went_on")
            time.sleep(0.01)


train()
