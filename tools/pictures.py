"""Draw pictures of real runs into docs/_static: `nox -s pictures`.

`killed-run.svg`: an example is trained twice, once undisturbed and once killed in the middle and started again with the
same command. Its tracker wrote the curves that are drawn.

`report-killed.html` and its picture: the report of a run in which a guard left a bad step out, a process was killed,
and the launcher started the run again. The picture needs Chromium.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import psutil

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


def report_of_a_killed_run(scratch: Path) -> None:
    """Trains with a damaged sample, kills one process, and writes the report with its picture."""
    run, script = scratch / "guarded", ROOT / "docs" / "examples" / "guarded.py"
    accel = [sys.executable, "-m", "accel_cli.main"]
    options = ["--cpu", "--num_processes", "2", "--max_restarts", "1", "--project_dir", str(run)]
    words = [*accel, "launch", "-q", *options, str(script), "--steps", "400", "--output", str(run)]
    environment, is_killed = {**os.environ, "OMP_NUM_THREADS": "1"}, False
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, cwd=scratch) as process:
        for line in process.stdout or ():
            if not is_killed and "step 250:" in line:
                children = psutil.Process(process.pid).children(recursive=True)
                next(one for one in children if one.environ().get("RANK") == "1").kill()
                is_killed = True
    if process.returncode:
        raise SystemExit(f"pictures: the example ended with exit code {process.returncode}")
    page = PICTURES / "report-killed.html"
    subprocess.run([*accel, "runs", "report", str(run), "-o", str(page)], check=True)
    text = page.read_text(encoding="utf-8")
    for path, public in ((scratch, "/home/me/runs"), (ROOT, "/home/me/accel"), (Path.home(), "/home/me")):
        text = text.replace(str(path), public)
    page.write_text(text, encoding="utf-8")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("pictures: Chromium is not installed, so report-killed.png stays as it is")
        return
    shot = [f"--screenshot={page.with_suffix('.png')}", "--window-size=1280,1500", "--virtual-time-budget=5000"]
    subprocess.run([browser, "--headless", "--no-sandbox", "--hide-scrollbars", *shot, page.as_uri()], check=True)


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
        report_of_a_killed_run(Path(scratch))
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
    print(f"pictures: wrote killed-run.svg and report-killed.html; after a restart losses differ by at most {apart:g}")
    return 0 if apart == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
