"""Draw pictures of real runs into docs/_static: `nox -s pictures`.

`killed-run.svg`: an example is trained twice, once undisturbed and once killed in the middle and started again with the
same command. Its tracker wrote the curves that are drawn.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

from accel_tracking import read_run

matplotlib.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "_static"
SCRIPT = ROOT / "docs" / "examples" / "char_gpt.py"
STEPS, KILLED_AFTER = 120, 50


def train(folder: Path, kill: bool = False) -> None:
    """Trains the example; `kill` ends all of its processes by SIGKILL once a step is printed."""
    command = [sys.executable, "-m", "accel_cli.main", "launch", "-q", "--cpu", "--num_processes", "2", str(SCRIPT)]
    words = [*command, "--steps", str(STEPS), "--output", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True) as process:
        for line in process.stdout or ():
            if kill and line.startswith(f"step {KILLED_AFTER}:"):
                os.killpg(process.pid, signal.SIGKILL)
    if not kill and process.returncode:
        raise SystemExit(f"pictures: the example ended with exit code {process.returncode}")


def curve(file: Path) -> tuple[list[int], list[float]]:
    """Steps and losses of one file of the tracker."""
    records = [record for record in read_run(file).records if "loss" in record.values]
    return [int(record.step or 0) for record in records], [float(record.values["loss"]) for record in records]


def main() -> int:
    """Trains, and draws."""
    with tempfile.TemporaryDirectory() as scratch:
        whole, killed = Path(scratch, "whole"), Path(scratch, "killed")
        train(whole)
        train(killed, kill=True)
        train(killed)
        (undisturbed,) = (curve(file) for file in whole.rglob("*.jsonl"))
        attempts = sorted((curve(file) for file in killed.rglob("*.jsonl")), key=lambda found: found[0][0])
    figure, axes = plt.subplots(figsize=(6.4, 3.0))
    axes.plot(*undisturbed, color="#9aa4b2", linewidth=6, alpha=0.6, label="undisturbed")
    for number, (steps, losses) in enumerate(attempts):
        label = "until it was killed" if number == 0 else "started again"
        axes.plot(steps, losses, color=("#d9822b", "#3b7dd8")[number % 2], marker="o", markersize=3, label=label)
    axes.axvline(KILLED_AFTER, color="#c0392b", linestyle=":", label="SIGKILL to all processes")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(PICTURES / "killed-run.svg", metadata={"Date": None}, facecolor="white")
    shared = dict(zip(*undisturbed, strict=True))
    last = attempts[-1]
    apart = max(abs(shared[step] - loss) for step, loss in zip(*last, strict=True))
    print(f"pictures: wrote killed-run.svg; after the restart the losses differ by at most {apart:g}")
    return 0 if apart == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
