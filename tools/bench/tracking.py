"""Microseconds that logging 20 numbers takes with the tracker that keeps JSON lines.

Rounds of 2,000 calls of `accelerator.log` and of `json.dumps` with a write of the same line to a file of its own
alternate; medians of 15 rounds, in CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

CALLS, ROUNDS, LIMIT = 2000, 15, 2.0
VALUES = {f"metric_{number}": 0.1 * number + 1 / 3 for number in range(20)}


def microseconds(play: Callable[[int], None]) -> float:
    """CPU time of one call in a round."""
    begun = time.process_time()
    for step in range(CALLS):
        play(step)
    return (time.process_time() - begun) * 1e6 / CALLS


def main(arguments: list[str]) -> int:
    """Measure and print one line."""
    from accel_torch import Accelerator

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", help="not used: the original has nothing like it")
    parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=folder)
        accelerator.init_trackers("run")
        file = os.open(Path(folder) / "raw.jsonl", os.O_WRONLY | os.O_CREAT)

        def log(step: int) -> None:
            accelerator.log(VALUES, step=step)

        def write(step: int) -> None:
            line = {"step": step, "time": round(time.time(), 3), "values": VALUES}
            os.write(file, (json.dumps(line) + "\n").encode())

        found = [(microseconds(log), microseconds(write)) for _ in range(ROUNDS)]
        accelerator.end_training()
        os.close(file)
    ours, raw = (statistics.median(side) for side in zip(*found, strict=True))
    line = {"case": "log of 20 numbers as a JSON line", "unit": "CPU us", "ours": ours, "peer": None, "raw": raw}
    print(json.dumps({**line, "figure": "ours/raw", "limit": LIMIT}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
