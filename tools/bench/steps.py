"""Microseconds that the prepared loop (accumulate, backward, step, scheduler, zero_grad) adds to a plain PyTorch step.

One process on the CPU; the loop runs in rounds of 400 steps that alternate between plain and prepared; medians of 15
rounds, for the original in an interpreter of its own, against plain rounds of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

STEPS, ROUNDS, LIMIT, RATIO = 400, 15, 20.0, 0.12
CASES = {
    "full precision, accumulation 1": ("no", 1),
    "full precision, accumulation 4": ("no", 4),
    "bf16, accumulation 1": ("bf16", 1),
}


def parts() -> tuple[Any, Any, Any, Any]:
    """A small model, its optimizer and schedule, and a loader."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = TensorDataset(torch.randn(STEPS * 4, 8), torch.randn(STEPS * 4, 1))
    return model, optimizer, scheduler, DataLoader(data, batch_size=4)


def plain(precision: str, accumulation: int) -> Callable[[], None]:
    """One round of the loop as it is written without any library."""
    import torch

    model, optimizer, scheduler, loader = parts()

    def round_of_steps() -> None:
        for index, (inputs, targets) in enumerate(loader, start=1):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                outputs = model(inputs)
            loss = torch.nn.functional.mse_loss(outputs.float(), targets)
            (loss / accumulation if accumulation > 1 else loss).backward()  # type: ignore[no-untyped-call]
            if index % accumulation == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return round_of_steps


def prepared(precision: str, accumulation: int) -> Callable[[], None]:
    """One round of the loop with an Accelerator, of ours or of the original's, whichever is installed."""
    import torch

    library: Any = importlib.import_module("accel_torch" if importlib.util.find_spec("accel_torch") else "accelerate")
    accelerator = library.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation)
    model, optimizer, scheduler, loader = accelerator.prepare(*parts())

    def round_of_steps() -> None:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return round_of_steps


def added(precision: str, accumulation: int) -> tuple[float, float]:
    """Microseconds per step: of the plain loop, and of the prepared one."""
    loops = plain(precision, accumulation), prepared(precision, accumulation)
    seen: tuple[list[float], list[float]] = ([], [])
    for attempt in range(ROUNDS + 1):
        for loop, times in zip(loops, seen, strict=True):
            start = time.process_time()
            loop()
            if attempt:
                times.append((time.process_time() - start) / STEPS * 1e6)
    return statistics.median(seen[0]), statistics.median(seen[1])


def child(precision: str, accumulation: int, python: str) -> tuple[float, float]:
    """`added`, measured in an interpreter of its own."""
    command = [python, __file__, "--case", precision, str(accumulation)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    raw, with_library = json.loads(shown.stdout.splitlines()[-1])
    return raw, with_library


def main() -> None:
    """Measure and print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer")
    parser.add_argument("--case", nargs=2)
    options = parser.parse_args()
    if options.case:
        import torch

        torch.set_num_threads(1)
        print(json.dumps(added(options.case[0], int(options.case[1]))))
        return
    for name, (precision, accumulation) in CASES.items():
        raw, ours = child(precision, accumulation, sys.executable)
        peer_raw, peer = child(precision, accumulation, options.peer)
        line = {"case": name, "unit": "CPU us per step", "ours": ours, "peer": peer - peer_raw + raw, "raw": raw}
        print(json.dumps({**line, "figure": "ours - raw", "limit": LIMIT}), flush=True)
        alone = {"case": f"{name}: added alone", "unit": "CPU us per step", "ours": ours - raw, "peer": peer - peer_raw}
        print(json.dumps({**alone, "raw": None, "figure": "ours/peer", "limit": RATIO}), flush=True)


if __name__ == "__main__":
    main()
