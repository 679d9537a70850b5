"""Runs of `resuming_script.py` by a launcher, for tests that interrupt them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TRAIN = str(Path(__file__).with_name("resuming_script.py"))
STEPS = 40
PATIENCE = 280.0


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code of a launch, and all that it printed."""
    output, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, output + errors


def losses(folder: Path, rank: int) -> dict[int, str]:
    """The losses by step; those of steps that were trained again come later."""
    path = folder / f"losses_{rank}"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {int(step): loss for step, loss in lines}


def losses_on_one_machine(folder: Path) -> list[dict[int, str]]:
    """The losses of two processes that nothing interrupts."""
    words = ["launch", "--launcher=local", "--num_processes=2", "--cpu", TRAIN, str(folder), str(STEPS), "0"]
    subprocess.run([sys.executable, "-m", "accel_cli.main", *words], check=True, timeout=PATIENCE)
    return [losses(folder, rank) for rank in (0, 1)]


def wait_until(reached: Callable[[], object], patience: float = PATIENCE) -> None:
    """Wait for a state of a run or a cluster, for a bounded time."""
    deadline = time.monotonic() + patience
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.2)
