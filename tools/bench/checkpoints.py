"""Wall time of saving and loading a 300 MB model with the state of Adam, on a disk.

Each library runs in interpreters of its own, one after the other, and each case is the median of its rounds;
"raw" writes the same tensors with safetensors and torch and flushes both files, in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROUNDS = 5
WIDTH, LAYERS = 2048, 18
"""Eighteen layers of 2048 x 2048 in fp32: 302 MB, and twice that for Adam."""


def parts(seed: int = 0) -> tuple[Any, Any]:
    """A model and an optimizer that has stepped."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return model, optimizer


def seconds(call: Callable[[], object]) -> float:
    """Wall seconds of a call, after the disk has come to rest."""
    os.sync()
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def accelerator(**project: Any) -> Any:
    """An Accelerator on the CPU."""
    from accelerate import Accelerator

    if not project:
        return Accelerator(cpu=True)
    from accelerate import ProjectConfiguration

    return Accelerator(cpu=True, project_config=ProjectConfiguration(**project))


def raw_write(folder: Path, model: Any, optimizer: Any) -> None:
    """Write and flush the same bytes."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.optimizer.state_dict(), folder / "optimizer.bin")
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def measure_saving(folder: Path, library: str) -> dict[str, list[float]]:
    """Seconds of synchronous saves, and of raw writes beside them."""
    found: dict[str, list[float]] = {"saved": [], "raw": [], "unflushed": []}
    quick = {"fsync": False} if library == "ours" else {}
    runs = {"unflushed": accelerator(**quick), "saved": accelerator()}
    prepared = {name: run.prepare(*parts()) for name, run in runs.items()}
    for number in range(ROUNDS + 1):
        for name, run in runs.items():
            taken = seconds(lambda run=run: run.save_state(str(folder / "a")))  # type: ignore[misc]
            found[name].append(taken)
            shutil.rmtree(folder / "a")
        found["raw"].append(seconds(lambda: raw_write(folder / "b", *prepared["saved"])))
        shutil.rmtree(folder / "b")
        if number == 0:
            for times in found.values():
                times.clear()
    return found


def measure_behind(folder: Path, library: str) -> dict[str, list[float]]:
    """Seconds that training stands still for an asynchronous save, and that a synchronous one takes.

    Samples of the contents are a part of it: taken once before `save_state` returns, and twice behind training.
    """
    import torch

    from accel_plugins.checkpoint.samples import samples_of
    from accel_plugins.checkpoint.snapshot import steady_tensors

    found: dict[str, list[float]] = {"first": [], "later": [], "samples": [], "synchronous": []}
    run = accelerator()
    model, optimizer = run.prepare(*parts())
    inputs = torch.randn(256, WIDTH)

    def step() -> float:
        run.backward(model(inputs).square().mean())
        begun = time.perf_counter()
        for hook in list(optimizer.optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer.optimizer, (), {})
        waited = time.perf_counter() - begun
        optimizer.step()
        optimizer.zero_grad()
        return waited

    step()
    for number in range(ROUNDS):
        blocked = seconds(lambda: run.save_state(str(folder / "a"), async_save=True)) + step()
        found["first" if number == 0 else "later"].append(blocked)
        run.wait_for_checkpoint()
        steady = steady_tensors([optimizer.optimizer])
        found["samples"].append(seconds(lambda steady=steady: samples_of(steady)))  # type: ignore[misc]
        found["synchronous"].append(seconds(lambda: run.save_state(str(folder / "b"))))
    return found


def measure_loading(folder: Path, library: str) -> dict[str, list[float]]:
    """Seconds of a load, and the megabytes by which its peak is above what is occupied afterwards."""
    import psutil

    run = accelerator()
    run.prepare(*parts())
    run.save_state(str(folder / "a"))
    os.sync()
    found: dict[str, list[float]] = {"loaded": [], "peak": []}
    process = psutil.Process()
    for _ in range(ROUNDS):
        _forget_peak()
        found["loaded"].append(seconds(lambda: run.load_state(str(folder / "a"))))
        found["peak"].append((_peak() - process.memory_info().rss) / 1e6)
    return found


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


MEASURES: Mapping[str, Callable[[Path, str], dict[str, list[float]]]] = {
    "saving": measure_saving,
    "behind": measure_behind,
    "loading": measure_loading,
}


def child(what: str, library: str) -> dict[str, float]:
    """Measure in this process; medians."""
    place = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=place) as folder:
        found = MEASURES[what](Path(folder), library)
    return {name: statistics.median(times) for name, times in found.items() if times}


def asked(python: str, what: str, library: str) -> dict[str, float]:
    """Measure in an interpreter of its own."""
    command = [python, __file__, "--child", what, "--library", library]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def cases(peer: str) -> list[dict[str, Any]]:
    """One line for each case."""
    ours = {what: asked(sys.executable, what, "ours") for what in MEASURES}
    theirs = {what: asked(peer, what, "peer") for what in ("saving", "loading")}
    saving, behind, loading = ours["saving"], ours["behind"], ours["loading"]
    rows = [
        ("save_state, flushed and hashed", saving["saved"], None, saving["raw"], "ours/raw", 1.25),
        ("save_state, fsync=False", saving["unflushed"], theirs["saving"]["saved"], None, "ours/peer", 1.3),
        ("async_save, blocked by the first", behind["first"], None, behind["synchronous"], "ours/raw", 0.25),
        ("async_save, blocked by each later", behind["later"], None, behind["synchronous"], "ours/raw", 0.1),
        (
            "async_save, samples of the contents",
            behind["samples"],
            None,
            behind["synchronous"],
            "ours/raw",
            0.05,
        ),
        ("load_state", loading["loaded"], theirs["loading"]["loaded"], None, "ours/peer", 0.6),
    ]
    lines = [
        {"case": case, "unit": "wall s", "ours": a, "peer": b, "raw": c, "figure": figure, "limit": limit}
        for case, a, b, c, figure, limit in rows
    ]
    peak = {"case": "load_state, peak above what is occupied afterwards", "unit": "MB", "ours": loading["peak"]}
    return [*lines, {**peak, "peer": theirs["loading"]["peak"], "raw": 0.0, "figure": "ours - raw", "limit": 100.0}]


def main() -> None:
    """Print the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer")
    parser.add_argument("--child")
    parser.add_argument("--library", default="ours")
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(arguments.child, arguments.library)))
        return
    for case in cases(arguments.peer):
        print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main()
