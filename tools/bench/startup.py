"""CPU seconds that importing the Accelerator and making one adds over `import torch`, and the modules that it imports.

Fresh interpreters, alternating between plain torch, ours and the original; medians of nine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

RUNS = 9
TAIL = (
    "; import resource; u = resource.getrusage(resource.RUSAGE_SELF); print(u.ru_utime + u.ru_stime, len(sys.modules))"
)
TORCH = "import sys, torch"
OURS = "import sys, torch; from accel_torch import Accelerator; Accelerator(cpu=True)"
PEER = "import sys, torch; from accelerate import Accelerator; Accelerator(cpu=True)"


def once(python: str, code: str) -> tuple[float, int]:
    """CPU seconds and number of modules of one fresh interpreter."""
    shown = subprocess.run([python, "-c", code + TAIL], capture_output=True, text=True, check=True, env=os.environ)
    seconds, modules = shown.stdout.split()[-2:]
    return float(seconds), int(modules)


def main() -> None:
    """Measure and print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True)
    peer = parser.parse_args().peer
    commands = {
        "torch": (sys.executable, TORCH),
        "ours": (sys.executable, OURS),
        "peer torch": (peer, TORCH),
        "peer": (peer, PEER),
    }
    seen: dict[str, list[tuple[float, int]]] = {name: [] for name in commands}
    for attempt in range(RUNS + 1):
        for name, command in commands.items():
            result = once(*command)
            if attempt:  # the first run writes the byte code
                seen[name].append(result)

    def median(name: str, index: int) -> float:
        return statistics.median(result[index] for result in seen[name])

    def case(name: str, index: int, scale: float, limit: float | None) -> None:
        ours = (median("ours", index) - median("torch", index)) * scale
        theirs = (median("peer", index) - median("peer torch", index)) * scale
        line = {"case": "import and Accelerator()", "unit": name, "ours": ours, "peer": theirs}
        print(json.dumps({**line, "figure": "ours/peer", "limit": limit}), flush=True)

    case("CPU ms over import torch", 0, 1000.0, 0.5)
    case("modules over import torch", 1, 1.0, None)


if __name__ == "__main__":
    main()
