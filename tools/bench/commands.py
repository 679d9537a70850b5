"""CPU seconds of commands that only tell something, and seconds from a launch to the first line of its script.

Each round starts every command once, ours and the original's in turn, each in a fresh process with its byte code
written before. The original has neither `explain` nor `env --light`: they stand beside its `--help` and its `env`.
"raw" is `python -c pass`, and torchrun for a launch that goes through it. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROUNDS = 5
COMMAND = Sequence[str]

CONFIG = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
use_cpu: true
"""
SCRIPT = "import os, time; os.write(1, f'{time.time()}\\n'.encode())\n"
ONE, TWO, THROUGH = 0.12, 0.2, 1.1


def cpu_seconds(command: COMMAND) -> float:
    """CPU time of a command and all it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def until_first_line(command: COMMAND) -> float:
    """Seconds until the script of a launch ran in the first of its processes."""
    begun = time.time()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return min(float(line) for line in done.stdout.split()) - begun


def medians(measure: Callable[[COMMAND], float], commands: Mapping[str, COMMAND]) -> dict[str, float]:
    """The median of each command; the first round writes the byte code and does not count."""
    found: dict[str, list[float]] = {name: [] for name in commands}
    for attempt in range(ROUNDS + 1):
        for name, command in commands.items():
            seconds = measure(command)
            if attempt:
                found[name].append(seconds)
    return {name: statistics.median(values) for name, values in found.items()}


def show(case: str, unit: str, ours: float, beside: str, other: float, limit: float) -> None:
    """Print the line of a case."""
    line = {"case": case, "unit": unit, "ours": ours, "peer": None, "raw": None, beside: other}
    print(json.dumps({**line, "figure": f"ours/{beside}", "limit": limit}), flush=True)


def telling(ours: str, peer: str, config: Path) -> None:
    """Commands that only tell something."""
    asked = {
        "accel --help": ([ours, "--help"], "accelerate --help", 4.0),
        "accel launch --help": ([ours, "launch", "--help"], "accelerate launch --help", 4.0),
        "accel explain of a file": ([ours, "explain", "--config_file", str(config)], "accelerate --help", 6.0),
        "accel env --light": ([ours, "env", "--light"], "accelerate env", 4.0),
    }
    commands: dict[str, COMMAND] = {name: command for name, (command, _, _) in asked.items()}
    for _, beside, _ in asked.values():
        commands[beside] = [peer, *beside.split()[1:]]
    commands["pass"] = [sys.executable, "-c", "pass"]
    seconds = medians(cpu_seconds, commands)
    for name, (_, beside, limit) in asked.items():
        show(name, "CPU s", seconds[name], "peer", seconds[beside], 0.05)
        show(name, "CPU s", seconds[name], "raw", seconds["pass"], limit)


def launching(ours: str, peer: str, script: Path) -> None:
    """Launches on one machine."""
    two, job = ("--num_processes", "2"), str(script)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2")
    commands = {
        "one": [ours, "launch", "--cpu", "--num_processes", "1", job],
        "one, original": [peer, "launch", "--cpu", "--num_processes", "1", job],
        "two": [ours, "launch", "--cpu", *two, job],
        "two, original": [peer, "launch", "--multi_gpu", *two, job],
        "through": [ours, "launch", "--cpu", "--launcher", "torchrun", *two, job],
        # As a script that joins a process group needs it: with a static port of 0 its processes would never meet.
        "torchrun": [*torchrun, "--standalone", job],
    }
    seconds = medians(until_first_line, commands)
    show("launch, one process, to its first line", "s", seconds["one"], "peer", seconds["one, original"], ONE)
    show("launch, two processes, to the first line", "s", seconds["two"], "peer", seconds["two, original"], TWO)
    show("launch through torchrun, to the first line", "s", seconds["through"], "raw", seconds["torchrun"], THROUGH)


def main() -> None:
    """Measure and print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True)
    peer = str(Path(parser.parse_args().peer).parent / "accelerate")
    ours = str(Path(sys.executable).parent / "accel")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        # Neither reads the file of whoever measures.
        os.environ["HF_HOME"] = folder
        script, config = Path(folder) / "job.py", Path(folder) / "run.yaml"
        script.write_text(SCRIPT, encoding="utf-8")
        config.write_text(CONFIG, encoding="utf-8")
        telling(ours, peer, config)
        launching(ours, peer, script)


if __name__ == "__main__":
    main()
