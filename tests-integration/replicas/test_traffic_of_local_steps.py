"""DiLoCo sends a fraction of the bytes of gradients that are averaged in every step, and learns as well."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip"))),
        reason="bytes are counted in a network namespace of its own, which needs root, unshare and ip",
    ),
]

SCRIPT = Path(__file__).with_name("train_characters.py")
STEPS, SYNC_EVERY, PATIENCE = 2000, 100, 800.0
LOOPBACK_ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")


def train(folder: Path, backend: str, kill_at: int | None = None) -> dict[str, Any]:
    """What the first replica of two noted at its end; with `kill_at`, the second is killed at about that step."""
    folder.mkdir()
    words = ["--cpu", f"--backend={backend}", "--replica_groups=2", f"--torchft_sync_every={SYNC_EVERY}"]
    words += ["--torchft_heartbeat_timeout=2", str(SCRIPT), str(folder), str(STEPS)]
    with open(folder / "output", "w") as output:
        launch = subprocess.Popen(
            [*LOOPBACK_ALONE, sys.executable, "-m", "accel_cli.main", "launch", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"},
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while launch.poll() is None:
            assert time.monotonic() < deadline, (folder / "output").read_text()
            for progress in folder.glob("progress-1-*"):
                if kill_at is not None and int(progress.read_text() or 0) >= kill_at:
                    os.kill(int(progress.name.rpartition("-")[2]), signal.SIGKILL)
                    kill_at = None
            time.sleep(0.1)
        assert launch.returncode == 0, (folder / "output").read_text()
        assert kill_at is None
    finally:
        if launch.poll() is None:
            launch.terminate()
            launch.wait(timeout=60)
    found: dict[str, Any] = json.loads((folder / "end-0.json").read_text())
    return found


def test_diloco_sends_a_fraction_of_the_bytes_and_learns_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every_step = train(tmp_path / "ddp", "torchft")
    apart = train(tmp_path / "diloco", "torchft-diloco", kill_at=450)
    sent, rarely = (run["bytes"] / STEPS / (4 * run["parameters"]) for run in (every_step, apart))
    with capsys.disabled():
        print(f"\nloss {apart['loss']:.4f} against {every_step['loss']:.4f}; sizes of the model that travel in a step:")
        print(f"{rarely:.4f} against {sent:.4f}, with all agreements, heartbeats and two states sent to a replica")
    # An exchange of two replicas sends twice the size of the model.
    assert sent > 2
    assert rarely < 0.04 * sent
    assert apart["loss"] <= 1.02 * every_step["loss"]
