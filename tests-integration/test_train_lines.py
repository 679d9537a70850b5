"""The tutorial's program for texts trains in all three ways, with every character of every paragraph once."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from accel_testing.processes import run_command

SCRIPT = str(Path(__file__).parents[1] / "docs" / "tutorials" / "train_lines.py")

pytestmark = pytest.mark.usefixtures("preloaded_python")
PRELOADED = ("accel_torch.accelerator",)

LINE = re.compile(r"Epoch (\d): loss ([\d.]+), (\d+) characters in (\d+) steps, (\d+)% of the places without a label")


def epochs(batches: str, processes: int) -> list[tuple[float, int, int, int]]:
    """Loss, characters, steps and percent of places without a label of each epoch."""
    launch = ["-m", "accel_cli.main", "launch", "--cpu", "--num_processes", str(processes)]
    run = run_command(
        [sys.executable, *launch, SCRIPT, "--batches", batches, "--paragraphs", "200"],
        timeout=240,
        env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found = LINE.findall(run.stdout)
    return [(float(loss), int(count), int(steps), int(empty)) for _, loss, count, steps, empty in found]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_program_trains_in_all_three_ways(processes: int) -> None:
    padded, tokens, packed = (epochs(batches, processes) for batches in ("padded", "tokens", "packed"))
    for first, second in (padded, tokens, packed):
        assert second[0] < first[0]
    assert len({count for run in (padded, tokens, packed) for _, count, _, _ in run}) == 1
    assert padded[0][3] > 40
    assert tokens[0][3] < 20
    assert packed[0][3] < 5
