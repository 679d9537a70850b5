"""Three steps of a GPT: `accel check-plan` estimates its memory, and with `--measure FILE` torch's allocator counts it.

The file gets the largest number of bytes that the first process held in its second step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from accel_torch import Accelerator, set_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))

from char_gpt import GPT, WINDOW  # type: ignore[import-not-found, unused-ignore]


def train() -> None:
    """Trains on one batch."""
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    model = GPT(width=256, depth=6)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    codes = torch.zeros(16, WINDOW, dtype=torch.long, device=accelerator.device)
    for step in range(3):
        with record_function(f"step {step}"):
            loss = torch.nn.functional.cross_entropy(model(codes).flatten(0, 1), codes.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


@contextmanager
def collectives_let_go() -> Iterator[None]:
    """Gives the threads of gloo time to release the tensors of each collective, as a device would at once."""
    work: Any = torch.distributed.Work
    wait = work.wait

    def wait_longer(*arguments: Any) -> Any:
        result = wait(*arguments)
        time.sleep(0.005)
        return result

    work.wait = wait_longer
    try:
        yield
    finally:
        work.wait = wait


def peak_of_second_step(recorded: Any) -> int:
    """The most bytes of torch's allocator, from the events of a profile."""
    events = recorded.profiler.kineto_results.events()
    second = next(event for event in events if event.name() == "step 1")
    start, end = second.start_ns(), second.start_ns() + second.duration_ns()
    now = peak = 0
    for event in sorted((one for one in events if one.name() == "[memory]"), key=lambda one: one.start_ns()):
        now += event.nbytes()
        if start <= event.start_ns() <= end:
            peak = max(peak, now)
    return int(peak)


def main() -> None:
    """Trains, with a profile or without."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", type=Path)
    measure = parser.parse_args().measure
    if measure is None:
        train()
        return
    with collectives_let_go(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        train()
    if os.environ.get("RANK", "0") == "0":
        measure.write_text(str(peak_of_second_step(recorded)), encoding="utf-8")


if __name__ == "__main__":
    main()
