"""Milliseconds that comparing replicas every 100 steps adds to a step of about 1 ms, with two processes over gloo.

Each round is 400 steps of a two-layer model on two processes; rounds alternate between two Accelerators, one that
compares and one that does not, and medians of 11 rounds are taken. Three checks lie in every round of the one, none in
those of the other.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, ROUNDS, EVERY, LIMIT = 400, 11, 100, 1.01


def rounds(width: int) -> tuple[list[float], list[float]]:
    """Milliseconds per step of each round, without and with checks; run on both processes."""
    from accel_torch import Accelerator

    plain, watched = round_of(Accelerator(cpu=True), width), round_of(watching(), width)
    measured: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for found, play in zip(measured, (plain, watched), strict=True):
            begun = time.perf_counter()
            play()
            found.append((time.perf_counter() - begun) * 1000 / STEPS)
    return measured


def watching() -> Any:
    """An Accelerator that compares replicas."""
    from accel_torch import Accelerator

    return Accelerator(cpu=True, check_replicas_every=EVERY)


def round_of(accelerator: Any, width: int) -> Callable[[], None]:
    """One round of steps."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model: Any = torch.nn.Sequential(*layers)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.001))
    inputs = torch.randn(16, width)

    def play() -> None:
        for _ in range(STEPS):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    return play


def main(arguments: list[str]) -> int:
    """Measures and prints one line."""
    from accel_state.testing.processes import Processes

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", help="not used: the original has nothing like it")
    parser.parse_args(arguments)
    # The processes look functions up by module, and this one is not called __main__ there.
    here = importlib.import_module(Path(__file__).stem)
    with Processes(2, timeout=300) as group:
        plain, watched = zip(*group.run(here.rounds, 128, timeout=300), strict=True)
    without = statistics.median(plain[0])
    with_checks = statistics.median(watched[0])
    line = {
        "case": f"a step with replicas compared every {EVERY} steps, 2 processes",
        "unit": "ms",
        "ours": round(with_checks, 4),
        "peer": None,
        "raw": round(without, 4),
        "figure": "ours/raw",
        "limit": LIMIT,
    }
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
