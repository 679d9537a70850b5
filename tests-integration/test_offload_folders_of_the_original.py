"""Offload folders go between ours and the original library, where $ACCEL_ORIGINAL_PYTHON names one that has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ORIGINAL = os.environ.get("ACCEL_ORIGINAL_PYTHON", "")

pytestmark = pytest.mark.skipif(not ORIGINAL, reason="$ACCEL_ORIGINAL_PYTHON names no interpreter with the original")

SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from accelerate import disk_offload
from accelerate.utils import OffloadedWeightsLoader, offload_state_dict
from torch import nn

task, folder = sys.argv[1:]

def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).eval()

others = {
    "turned": torch.arange(6.0).reshape(2, 3).t(), "half": torch.tensor([1.0, -2.0]).bfloat16(),
    "float16": torch.tensor([0.5]).half(), "scalar": torch.tensor(7), "mask": torch.tensor([True, False]),
    "small": torch.arange(4.0).to(torch.float8_e4m3fn), "complex": torch.tensor([1 + 2j]), "empty": torch.zeros(0, 3),
}
x = torch.arange(16.0).reshape(2, 8)
if task == "write":
    offload_state_dict(folder, {**made().state_dict(), **others})
else:
    stored = OffloadedWeightsLoader(save_folder=folder)
    expected = {**made().state_dict(), **others}
    assert set(stored) == set(expected)
    for name, weight in expected.items():
        assert (stored[name].dtype, stored[name].shape) == (weight.dtype, weight.shape), name
        assert stored[name].tolist() == weight.tolist(), name
    with torch.no_grad():
        for _ in range(2):
            disk_offload(model := made(), folder)
            assert torch.equal(model(x), made()(x))
print("done")
"""


@pytest.mark.parametrize(("writer", "reader"), [("original", "ours"), ("ours", "original")])
def test_folders_go_both_ways(tmp_path: Path, writer: str, reader: str) -> None:
    for library, task in ((writer, "write"), (reader, "read")):
        python = sys.executable if library == "ours" else ORIGINAL
        command = [python, "-c", SCRIPT, task, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert done.stdout.endswith("done\n"), done.stderr
