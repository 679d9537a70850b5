"""Scripts without `if __name__ == "__main__":` whose DataLoader workers import the script again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from torch.utils.data import DataLoader
from accel_data import prepare_data_loader

data = torch.arange(8)
loader = prepare_data_loader(DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context={method!r}))
{guard}print([batch.tolist() for batch in loader])
"""


def run(folder: Path, method: str, guard: str = "") -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(method=method, guard=guard))
    return subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.skipif(sys.platform == "win32", reason="has other start methods")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_missing_guard_is_named_once(tmp_path: Path, method: str) -> None:
    done = run(tmp_path, method)
    assert done.returncode == 1
    assert done.stderr.count("Put the main part of the script under `if __name__ == '__main__':`") == 1
    assert done.stderr.count("cannot start its DataLoader workers") == 1
    assert "bootstrapping phase" not in done.stderr
    assert done.stderr.splitlines()[-3].startswith("accel_state.errors.DataError: Process 0 of 1, loader over Tensor")


@pytest.mark.skipif(sys.platform == "win32", reason="has other start methods")
def test_a_guarded_script_runs(tmp_path: Path) -> None:
    done = run(tmp_path, "spawn", 'if __name__ == "__main__": ')
    assert done.stdout.splitlines() == ["[[0, 1], [2, 3], [4, 5], [6, 7]]"], done.stderr
