"""Microseconds of one scheduler step in a run of 1024 processes, where a schedule moves on by 1024 of its own steps.

The prepared scheduler against plainly stepping the same schedule 1024 times; medians of 7 rounds that alternate, each
of 20 steps for ours and 2 for the loop. A step over milestones is allowed 0.1 microseconds more for each one passed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, Final

PROCESSES, ROUNDS, OURS, LOOP = 1024, 7, 20, 2
BUDGET, PER_MILESTONE, SHARE = 10.0, 0.1, 0.2
HORIZON: Final = PROCESSES * OURS * (ROUNDS + 2)
EVERY: Final = 100
"""Steps between two milestones."""


def schedules() -> dict[str, tuple[Callable[[Any], Any], float]]:
    """By name: how it is made for an optimizer, and milestones passed in a step; negative for those that recur."""
    from torch.optim import lr_scheduler as kinds

    milestones = list(range(EVERY, HORIZON, EVERY))
    passed = PROCESSES / EVERY
    return {
        "LambdaLR": (lambda o: kinds.LambdaLR(o, lambda step: 1 / (1 + step)), 0),
        "OneCycleLR": (lambda o: kinds.OneCycleLR(o, 0.1, total_steps=HORIZON + 1), 0),
        "CyclicLR": (lambda o: kinds.CyclicLR(o, 0.01, 0.1, step_size_up=500, cycle_momentum=False), 0),
        "CosineAnnealingWarmRestarts": (lambda o: kinds.CosineAnnealingWarmRestarts(o, 300, 2), 0),
        "StepLR": (lambda o: kinds.StepLR(o, EVERY, 0.999), passed),
        "MultiStepLR": (lambda o: kinds.MultiStepLR(o, milestones, 0.999), passed),
        "ConstantLR": (lambda o: kinds.ConstantLR(o, 0.5, 5000), 1),
        "CosineAnnealingLR": (lambda o: kinds.CosineAnnealingLR(o, HORIZON), -1),
        "ExponentialLR": (lambda o: kinds.ExponentialLR(o, 0.99999), -1),
        "LinearLR": (lambda o: kinds.LinearLR(o, 0.5, total_iters=HORIZON), -1),
        "PolynomialLR": (lambda o: kinds.PolynomialLR(o, HORIZON, 2.0), -1),
    }


def measured(make: Callable[[Any], Any]) -> tuple[float, float]:
    """Microseconds of a step of the prepared schedule, and of 1024 plain ones."""
    import torch

    from accel_plugins.wrapped.scheduler import AcceleratedScheduler
    from accel_state.gradient import GradientState

    def optimizer() -> Any:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)

    own = optimizer()
    ours = AcceleratedScheduler(make(own), own, gradient=GradientState(), processes=PROCESSES)
    plain = make(optimizer())

    def loop() -> None:
        for _ in range(PROCESSES):
            plain.step()

    rounds = [(timed(ours.step, OURS), timed(loop, LOOP)) for _ in range(ROUNDS)]
    return statistics.median(one for one, _ in rounds), statistics.median(other for _, other in rounds)


def timed(action: Callable[[], None], times: int) -> float:
    """CPU microseconds of one call."""
    start = time.process_time_ns()
    for _ in range(times):
        action()
    return (time.process_time_ns() - start) / times / 1000


def main() -> None:
    """Measure and print one line for each schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer")
    parser.parse_args()
    # Nothing is trained here, so torch misses the optimizer's steps.
    warnings.filterwarnings("ignore", "Detected call of", UserWarning)
    for name, (make, passed) in schedules().items():
        ours, loop = measured(make)
        line: dict[str, Any] = {"case": name, "unit": "CPU us", "ours": ours, "peer": None}
        if passed < 0:
            line |= {"case": f"{name}, against 1024 plain steps", "raw": loop, "figure": "ours/raw", "limit": SHARE}
        else:
            line |= {"raw": 0.0, "figure": "ours - raw", "limit": BUDGET + PER_MILESTONE * passed}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
