"""CPU time that importing the Accelerator and making one takes in a process that has imported torch.

Fresh interpreters, alternating between ours and the original; medians of nine. What torch has made is frozen first:
otherwise the figure depends on whether the collection of all of it, which is due at some time, falls into it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

RUNS = 9
CODE = """
import gc, sys, time, torch
gc.collect(); gc.freeze()
modules, start = len(sys.modules), time.process_time()
from {library} import Accelerator
Accelerator()
print(time.process_time() - start, len(sys.modules) - modules)
"""


def once(python: str, library: str) -> tuple[float, int]:
    """CPU seconds and number of modules imported, in one fresh interpreter."""
    code = CODE.format(library=library)
    shown = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    seconds, modules = shown.stdout.split()[-2:]
    return float(seconds), int(modules)


def main() -> None:
    """Measure and print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True)
    commands = {"ours": (sys.executable, "accel_torch"), "peer": (parser.parse_args().peer, "accelerate")}
    seen: dict[str, list[tuple[float, int]]] = {name: [] for name in commands}
    for attempt in range(RUNS + 1):
        for name, command in commands.items():
            result = once(*command)
            if attempt:  # the first run writes the byte code
                seen[name].append(result)

    def case(unit: str, index: int, scale: float, limit: float | None) -> None:
        ours, peer = (statistics.median(result[index] for result in seen[name]) * scale for name in ("ours", "peer"))
        line = {"case": "import and Accelerator()", "unit": unit, "ours": ours, "peer": peer}
        print(json.dumps({**line, "figure": "ours/peer", "limit": limit}), flush=True)

    case("CPU ms", 0, 1000.0, 0.5)
    case("modules", 1, 1.0, None)


if __name__ == "__main__":
    main()
