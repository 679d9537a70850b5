"""Trains, kills, hangs and measures real runs on this machine, and returns the figures that pictures show of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from accel_state.watch.goodput import account_history, read_goodput
from accel_state.watch.record import CATEGORIES, DOWN, START_UP
from accel_tracking import read_run

__all__ = ("FIGURES", "figures_of", "report_of_a_guarded_run")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
ACCEL = [sys.executable, "-m", "accel_cli.main"]
LAUNCH = [*ACCEL, "launch", "-q", "--cpu"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def started(words: list[str], folder: Path) -> subprocess.Popen[str]:
    """A command in a session of its own, whose output can be read."""
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=folder, start_new_session=True
    )


def finished(words: list[str], folder: Path) -> str:
    """What a command prints.

    Raises:
        SystemExit: it fails.
    """
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=folder, check=False)
    if done.returncode:
        raise SystemExit(f"pictures: exit code {done.returncode} of {' '.join(words)}")
    return done.stdout


# ---------------------------------------------------------------- a run that is killed and started again
STEPS, KILLED_AFTER = 240, 50


def killed_run(scratch: Path) -> dict[str, Any]:
    """Losses of an example without an interruption and with one, and where the time of the second run went."""

    def words(run: Path) -> list[str]:
        script = [str(EXAMPLES / "char_gpt.py"), "--steps", str(STEPS), "--output", str(run)]
        return [*LAUNCH, "--num_processes", "2", "--project_dir", str(run), *script]

    whole, killed = scratch / "whole", scratch / "killed"
    finished(words(whole), scratch)
    with started(words(killed), scratch) as process:
        for line in process.stdout or ():
            if line.startswith(f"step {KILLED_AFTER}:"):
                os.killpg(process.pid, signal.SIGKILL)
    finished(words(killed), scratch)
    (undisturbed,), attempts = curves(whole), curves(killed)
    shared = dict(undisturbed)
    apart = max(abs(shared[step] - loss) for step, loss in attempts[-1])
    return {
        "steps": STEPS,
        "killed_after": KILLED_AFTER,
        "undisturbed": undisturbed,
        "attempts": attempts,
        "largest_difference": apart,
        "time": time_by_category(killed),
    }


def curves(run: Path) -> list[list[tuple[int, float]]]:
    """Steps and losses of each start of a run, in their order; the tracker writes a file for each."""
    files = [file for file in run.rglob("*.jsonl") if file.parent not in (run, run / "goodput")]
    read = [[record for record in read_run(file).records if "loss" in record.values] for file in files]
    points = [[(int(one.step or 0), float(one.values["loss"])) for one in records] for records in read]
    return sorted(points, key=lambda start: start[0][0])


def time_by_category(run: Path, moments: int = 120) -> dict[str, Any]:
    """Seconds of an average process by category, added up to each moment of a run; with the times of its starts."""
    summary, history = read_goodput(run), account_history(run)
    grid = np.linspace(0, summary.wall, moments + 1)[1:]
    totals: dict[str, Any] = {name: np.zeros(moments) for name in CATEGORIES}
    for lines in history.values():
        times, seconds = account_of(lines, summary.began)
        for name in CATEGORIES:
            totals[name] += np.interp(grid, times, seconds[name]) / len(history)
    return {
        "moments": np.round(grid, 2).tolist(),
        "seconds": {name: np.round(total, 2).tolist() for name, total in totals.items() if total[-1] > 0.05},
        "starts": sorted({round(line["began"] - summary.began, 2) for line in history[0]}),
        "goodput": round(summary.goodput, 4),
    }


def account_of(lines: list[dict[str, Any]], began: float) -> tuple[list[float], dict[str, list[float]]]:
    """When the lines of a process were written, and its seconds by category until then, over all its starts."""
    times, seconds = [0.0], {name: [0.0] for name in CATEGORIES}
    before, start = dict.fromkeys(CATEGORIES, 0.0), -1.0
    for line in sorted(lines, key=lambda one: (one["began"], one["time"])):
        if line["began"] != start:
            before = {name: values[-1] for name, values in seconds.items()}
            before[CATEGORIES[START_UP if start < 0 else DOWN]] += line["began"] - began - times[-1]
            start = line["began"]
            times.append(start - began)
            for name in CATEGORIES:
                seconds[name].append(before[name])
        times.append(line["time"] - began)
        for name in CATEGORIES:
            seconds[name].append(before[name] + line["seconds"].get(name, 0.0))
    return times, seconds


# ---------------------------------------------------------------- the report of a run with a bad step and a failure
def report_of_a_guarded_run(page: Path) -> None:
    """Trains with a damaged sample, kills one process, and writes the report with its picture, which needs Chromium."""
    with tempfile.TemporaryDirectory() as folder:
        write_report(Path(folder), page)
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("pictures: Chromium is not installed, so report-killed.png stays as it is")
        return
    shot = [f"--screenshot={page.with_suffix('.png')}", "--window-size=1280,1500", "--virtual-time-budget=5000"]
    words = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", *shot, page.as_uri()]
    subprocess.run(words, check=True, stderr=subprocess.DEVNULL)


def write_report(scratch: Path, page: Path) -> None:
    """The report of a run with a guard, a killed process and a restart, without the names of folders here."""
    run, script = scratch / "guarded", EXAMPLES / "guarded.py"
    options = ["--num_processes", "2", "--max_restarts", "1", "--project_dir", str(run)]
    words, is_killed = [*LAUNCH, *options, str(script), "--steps", "400", "--output", str(run)], False
    with started(words, scratch) as process:
        for line in process.stdout or ():
            if not is_killed and "step 250:" in line:
                process_of_rank(process.pid, "1").kill()
                is_killed = True
    if process.returncode:
        raise SystemExit(f"pictures: the example ended with exit code {process.returncode}")
    finished([*ACCEL, "runs", "report", str(run), "-o", str(page)], scratch)
    text = page.read_text(encoding="utf-8")
    for path, public in ((scratch, "/home/me/runs"), (ROOT, "/home/me/accel"), (Path.home(), "/home/me")):
        text = text.replace(str(path), public)
    page.write_text(text, encoding="utf-8")


def process_of_rank(launcher: int, rank: str) -> psutil.Process:
    """The process of a rank below its launcher."""
    children = psutil.Process(launcher).children(recursive=True)
    return next(one for one in children if one.environ().get("RANK") == rank)


# ---------------------------------------------------------------- memory: what a plan says, and what is allocated
_BLOCKS = ["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "Block"]
_FSDP = ["--backend", "fsdp2", *_BLOCKS]
PLANS = {
    "one process": (1, []),
    "ddp, 2 processes": (2, []),
    "fsdp2, 2 processes": (2, _FSDP),
    "fsdp2, 4 processes": (4, _FSDP),
    "fsdp2, 2 processes, activations recomputed": (2, [*_FSDP, "--fsdp_activation_checkpointing", "true"]),
}
"""Name of each plan, its number of processes, and its flags of `accel launch`."""
_TURNS = 2
"""Threads of gloo hold tensors for a while after a collective: what a plan needs is the least of several runs."""


def memory_of_plans(scratch: Path) -> list[dict[str, Any]]:
    """For each plan, the bytes at the peak that `accel check-plan` says, by purpose, and those that torch allocated."""
    script = str(Path(__file__).with_name("measured_training.py"))
    rows = []
    for name, (processes, flags) in PLANS.items():
        options = ["--processes", str(processes), f"--launch={shlex.join(flags)}"]
        memory = json.loads(finished([*ACCEL, "check-plan", "--json", *options, script], scratch))["memory"]
        peaks = []
        for _ in range(_TURNS if processes > 1 else 1):
            output = scratch / "peak"
            launch = [*LAUNCH, "--num_processes", str(processes), *flags, script, "--measure", str(output)]
            finished(launch, scratch)
            peaks.append(int(output.read_text(encoding="utf-8")))
        rows.append({"plan": name, "estimated": memory, "allocated": min(peaks)})
    return rows


# ---------------------------------------------------------------- samples of different lengths
def batches(scratch: Path) -> dict[str, Any]:
    """For each way of making batches, the characters and places of each, and the last loss of a real training."""
    sys.path.insert(0, str(ROOT / "docs" / "tutorials"))
    from train_lines import loader_of, paragraphs  # type: ignore[import-not-found, unused-ignore]

    script, samples = str(ROOT / "docs" / "tutorials" / "train_lines.py"), paragraphs(2000)
    rows = {}
    for way in ("padded", "tokens", "packed"):
        loader = loader_of(way, samples, 32)
        shown = [(int((batch["labels"] != -100).sum()), batch["labels"].numel()) for batch in loader]
        printed = finished([*LAUNCH, "--num_processes", "2", script, "--batches", way], scratch)
        rows[way] = {"batches": shown, "loss": float(re.findall(r"loss ([\d.]+)", printed)[-1])}
    return rows


# ---------------------------------------------------------------- a hang
HANGING = """\
import time

import torch
from accel_torch import Accelerator

accelerator = Accelerator(cpu=True, project_dir="runs")
model, optimizer = torch.nn.Linear(8, 1), None
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in range(1, 1000):
    loss = model(torch.randn(4, 8)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step == 41 and accelerator.is_last_process:
        time.sleep(3600)  # such as a file system that does not answer
    losses = accelerator.gather(loss.detach())
    if step % 20 == 0:
        accelerator.print(f"step {step}: loss {losses.mean().item():.3f}")
"""


def hang(scratch: Path) -> list[tuple[float, str]]:
    """What terminals print while one of two processes of a run does not arrive, each line with its second."""
    (scratch / "train.py").write_text(HANGING, encoding="utf-8")
    shown = ["--num_processes", "2", "--hang_report_after", "10", "train.py"]
    words = [*ACCEL, "launch", "--cpu", *shown]
    begun, lines = time.monotonic(), [(0.0, f"$ accel launch {' '.join(shown)}")]

    def add(text: str) -> None:
        lines.append((round(time.monotonic() - begun, 1), text))

    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        cwd=scratch,
        start_new_session=True,
    )
    try:
        for line in process.stdout or ():
            add(line.rstrip())
            if "rank 0 is in gather" in line:
                break
        add("")
        add("# in another terminal, while it hangs")
        add("$ accel runs status runs")
        status = finished([*ACCEL, "runs", "status", str(scratch / "runs")], scratch)
        for line in status.rstrip().splitlines():
            add(without_names(line, scratch))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return list(merged(lines))


def without_names(line: str, scratch: Path) -> str:
    """A line without the name of this machine and of the temporary folder, and as wide as before."""
    host = socket.gethostname()
    width = max(len(host), len("host"))
    return line.replace(f"{scratch}{os.sep}", "").replace(f" {host:<{width}} ", f" {'node':<{width}} ")


def merged(lines: list[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    """The lines, with pauses of at most two seconds between them."""
    now = 0.0
    yield lines[0]
    for (before, _), (moment, text) in pairwise(lines):
        now += min(moment - before, 2.0)
        yield round(now, 1), text


FIGURES: dict[str, Callable[[Path], Any]] = {
    "killed run": killed_run,
    "memory of plans": memory_of_plans,
    "batches": batches,
    "hang": hang,
}
"""What is measured in a temporary folder, by the name of its figures."""


def figures_of(name: str) -> Any:
    """The figures of one name, from real runs."""
    with tempfile.TemporaryDirectory() as folder:
        return FIGURES[name](Path(folder))
