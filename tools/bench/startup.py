"""CPU time of imports: of the Accelerator, and of eight names at old addresses, in a process that has imported torch,
each with making an Accelerator; and of a whole process that imports nothing but the drop-in.

Fresh interpreters, alternating between ours and the original; medians of nine. What torch has made is frozen first:
otherwise the figure depends on whether the collection of all of it, which is due at some time, falls into it. For
`import accelerate`, raw is a process that imports accel_torch, and the medians are of 45.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable

RUNS = 9
CODE = """
import gc, sys, time, torch
gc.collect(); gc.freeze()
modules, start = len(sys.modules), time.process_time()
{statements}
print(time.process_time() - start, len(sys.modules) - modules)
"""
MAKING = "from {} import Accelerator\nAccelerator()"
EIGHT = """
from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch, notebook_launcher
from accelerate import skip_first_batches
from accelerate.utils import DistributedType, gather, send_to_device, set_seed
Accelerator(cpu=True)
"""

Measure = Callable[[str, str], tuple[float, int]]
Seen = dict[str, list[tuple[float, int]]]


def once(python: str, statements: str) -> tuple[float, int]:
    """CPU seconds and number of modules imported, in one fresh interpreter that has torch."""
    code = CODE.format(statements=statements)
    shown = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    seconds, modules = shown.stdout.split()[-2:]
    return float(seconds), int(modules)


def whole(python: str, statements: str) -> tuple[float, int]:
    """CPU seconds of a whole process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([python, "-c", statements], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 0


def alternating(measure: Measure, commands: dict[str, tuple[str, str]], runs: int = RUNS) -> Seen:
    """What each command took in turn."""
    seen: Seen = {name: [] for name in commands}
    for attempt in range(runs + 1):
        for name, command in commands.items():
            result = measure(*command)
            if attempt:  # the first run writes the byte code
                seen[name].append(result)
    return seen


def case(name: str, seen: Seen, unit: str, figure: str, limit: float | None) -> None:
    """Print one line."""
    index, scale = (1, 1.0) if unit == "modules" else (0, 1000.0)
    medians = {who: statistics.median(result[index] for result in found) * scale for who, found in seen.items()}
    print(json.dumps({"case": name, "unit": unit, **medians, "figure": figure, "limit": limit}), flush=True)


def main() -> None:
    """Measure and print all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True)
    ours, peer = sys.executable, parser.parse_args().peer
    for name, statements, theirs, limit in (
        ("import and Accelerator()", MAKING.format("accel_torch"), MAKING.format("accelerate"), 0.5),
        ("eight old names and Accelerator()", EIGHT, EIGHT, 0.9),
    ):
        seen = alternating(once, {"ours": (ours, statements), "peer": (peer, theirs)})
        case(name, seen, "CPU ms", "ours/peer", limit)
        case(name, seen, "modules", "ours/peer", None)
    alone = {"ours": (ours, "import accelerate"), "raw": (ours, "import accel_torch")}
    case("import accelerate", alternating(whole, alone, 5 * RUNS), "CPU ms", "ours/raw", 1.05)


if __name__ == "__main__":
    main()
