"""A check keeps what a script saves, loads and tracks out of the user's folders."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import accel_check.started
from accel_testing.processes import run_command

pytestmark = [pytest.mark.usefixtures("preloaded_python")]
PRELOADED = ("accel_torch.accelerator", "accel_check.comparison", "accel_check.recorder")

OURS = """
import torch
from accel_torch import Accelerator, ProjectConfiguration
from torch.utils.data import DataLoader, TensorDataset

project = ProjectConfiguration("{folder}", automatic_checkpoint_naming=True, total_limit=1)
accelerator = Accelerator(cpu=True, project_config=project, log_with="tensorboard")
accelerator.init_trackers("run")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
found = accelerator.load_state(missing_ok=True)
found = found or accelerator.load_state("{folder}/named", missing_ok=True)
for number, (x,) in enumerate(loader):
    accelerator.backward(model(x).square().mean() * (0 if found else 1))
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state()
    accelerator.save({{"number": number}}, "{folder}/number.pt")
    accelerator.save_model(model, "{folder}/weights")
    accelerator.log({{"number": number}})
accelerator.end_training()
"""

FOREIGN = """
import os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))
for number, (x,) in enumerate(DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save({{"number": number}}, "{folder}/state.pt")
    assert torch.load("{folder}/state.pt")["number"] == number
    checkpoints.save({{"model": model.module.state_dict()}}, checkpoint_id="{folder}/distributed")
    with open("{folder}/own.txt", "a") as file:
        file.write("x")
dist.destroy_process_group()
"""


def check(script: Path) -> tuple[int, dict[str, Any]]:
    words = [sys.executable, str(accel_check.started.__file__), "check-parity", "--json", "--steps", "3"]
    given = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    finished = run_command([*words, str(script)], timeout=280, env=given)
    assert finished.stdout, str(finished)
    return finished.returncode, json.loads(finished.stdout)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_real_checkpoints_are_neither_read_nor_pruned(tmp_path: Path) -> None:
    folder, script = tmp_path / "run", tmp_path / "train.py"
    for name in ("checkpoints/checkpoint_0", "checkpoints/checkpoint_1", "named"):
        (folder / name).mkdir(parents=True)
        (folder / name / "weights.bin").write_bytes(b"kept")
    before = contents(folder)
    script.write_text(OURS.format(folder=folder), encoding="utf-8")
    code, report = check(script)
    assert (code, report["verdict"]) == (0, "equal"), report
    assert contents(folder) == before


def test_what_a_foreign_script_saves_is_read_back_and_other_files_are_listed(tmp_path: Path) -> None:
    folder, script = tmp_path / "run", tmp_path / "train.py"
    folder.mkdir()
    script.write_text(FOREIGN.format(folder=folder), encoding="utf-8")
    code, report = check(script)
    assert (code, report["verdict"]) == (0, "equal"), report
    assert list(contents(folder)) == [str(folder / "own.txt")]
    assert report["written"] == [str(folder / "own.txt")]
