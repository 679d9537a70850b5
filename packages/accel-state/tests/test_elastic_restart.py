"""A run whose process is killed starts again under torchrun, and its processes meet again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel_testing.processes import run_command

SCRIPT = """
import os, signal, sys
import torch
from accel_state import PartialState

state = PartialState(cpu=True, timeout=60)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(5):
    total = torch.ones(1)
    state._process.transport.all_reduce(total).wait()
    assert total.item() == 2.0
    if attempt < 2 and step == 2 and state.process_index == attempt:
        os.kill(os.getpid(), signal.SIGKILL)
open(os.path.join(sys.argv[1], f"rank{state.process_index}"), "w").write(str(attempt))
state.wait_for_everyone()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@pytest.mark.usefixtures("preloaded_python")
def test_the_run_continues_after_each_rank_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(script), str(tmp_path)),
    ]
    done = run_command(command, env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["2", "2"]
