"""Run the short scripts of tests-integration/parity with a library, and record what the original does.

python tools/parity.py --record PYTHON      write recorded.json with the original that this Python has
python tools/parity.py --show PYTHON        print where that Python's library differs from what is recorded
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accel_testing.processes import ReservedPort

FOLDER = Path(__file__).resolve().parents[1] / "tests-integration" / "parity"
RECORDED = FOLDER / "recorded.json"
COUNTS = (1, 2)

Outcomes = dict[str, list[Any]]
"""For each case, the outcome on every process."""

OUTPUT_LENGTH = 3000
"""Characters of the end of a process's output that an error shows."""


class PlayFailed(Exception):
    """A process died or did not end; the message has the exit code and the last output of every rank."""


def topics() -> list[str]:
    """The modules with cases."""
    return sorted(path.stem for path in (FOLDER / "cases").glob("*.py"))


def played(python: str, processes: int, only: list[str] | None = None, timeout: float = 300) -> Outcomes:
    """Runs topics (all if none is named) with a Python on a number of processes.

    Raises:
        PlayFailed: not every process ended with exit code 0 within `timeout` seconds.
    """
    port = ReservedPort()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:
        ending.callback(port.release)
        files = [Path(folder) / f"{rank}.jsonl" for rank in range(processes)]
        common = _environment(processes, port.reserve())
        started = []
        for rank, file in enumerate(files):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            with file.with_suffix(".txt").open("w") as text:
                # Do not resolve the link: its path identifies the virtual environment.
                command = [os.path.abspath(python), str(FOLDER / "play.py"), str(file), *(only or topics())]
                started.append(subprocess.Popen(command, env={**common, **place}, cwd=folder, stdout=text, stderr=text))
        codes = _exit_codes(started, timeout)
        if codes != [0] * processes:
            raise PlayFailed("\n".join(map(_ending, range(processes), codes, files)))
        ranks = [_lines(file) for file in files]
        return {case: [rank[case] for rank in ranks] for case in ranks[0]}


def _exit_codes(started: list[subprocess.Popen[bytes]], timeout: float) -> list[int | None]:
    """The exit code of each process, or None for one that still ran at the timeout; ends those that remain."""
    deadline = time.monotonic() + timeout
    try:
        return [_exit_code(process, deadline - time.monotonic()) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def _exit_code(process: subprocess.Popen[bytes], timeout: float) -> int | None:
    try:
        return process.wait(max(timeout, 0))
    except subprocess.TimeoutExpired:
        return None


def _ending(rank: int, code: int | None, file: Path) -> str:
    """How a rank ended, and what it printed last."""
    how = "was still busy" if code is None else f"ended with exit code {code}"
    return f"--- rank {rank} {how} ---\n{file.with_suffix('.txt').read_text(errors='replace')[-OUTPUT_LENGTH:]}"


def _environment(processes: int, port: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ACCEL", "PYTHONPATH"))}
    common = {**inherited, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}
    if processes == 1:
        return common
    place = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return {**common, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _lines(file: Path) -> dict[str, Any]:
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return {line["case"]: line["outcome"] for line in map(json.loads, text.splitlines())}


def alike(one: Any, other: Any) -> bool:
    """Whether two outcomes are equal, numbers within the tolerance of single precision."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    return bool(one == other)


def main(arguments: list[str]) -> int:
    """Records or shows, and returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", metavar="PYTHON", help="has the original library")
    what.add_argument("--show", metavar="PYTHON", help="has a library to compare")
    parser.add_argument("topics", nargs="*", help="all when left out")
    options = parser.parse_args(arguments)
    recorded: dict[str, Outcomes] = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    for count in COUNTS:
        outcomes = played(options.record or options.show, count, options.topics)
        before = recorded.setdefault(str(count), {})
        if options.record:
            replaced = options.topics or topics()
            others = {case: values for case, values in before.items() if case.partition(".")[0] not in replaced}
            recorded[str(count)] = {**others, **outcomes}
            continue
        for case, values in outcomes.items():
            if not alike(values, before.get(case)):
                print(f"{case}, {count} processes\n    here     {values}\n    recorded {before.get(case)}")
    if options.record:
        RECORDED.write_text(json.dumps(recorded, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
