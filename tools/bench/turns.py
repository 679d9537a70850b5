"""The runner: starts interpreters of ours and of the original in turn until medians are steady."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Final

from bench.case import FIGURES, Case, Work
from bench.results import Row, half_quartiles, line

ROOT: Final = Path(__file__).resolve().parents[2]
ADDED: Final = "(ours - raw)/(peer - raw)"

Sides = dict[str, dict[str, float]]
"""By side, what each meter read."""


class CannotMeasure(RuntimeError):
    """An interpreter of a turn failed; the message has what it printed."""


@dataclass(frozen=True)
class Pace:
    """How long a session of works is measured.

    Args:
        least: turns in any case.
        most: turns at most.
        seconds: after them no further turn begins, once there were the least.
        steady: a work has enough turns when the error of its median is below this part of it.
    """

    least: int = 3
    most: int = 15
    seconds: float = 15.0
    steady: float = 0.01


@dataclass(eq=False)
class Measured:
    """A work, its rows, and what each turn found."""

    work: Work
    rows: list[Case]
    turns: list[Sides] = field(default_factory=list)

    def value(self, case: Case, turn: Sides, side: str) -> float | None:
        """What a side took in a turn, in the unit of a row."""
        if side not in turn:
            return None
        value = turn[side][case.meter]
        if side == "peer" and "peer's raw" in turn:
            # What the original adds to a raw round in its own interpreter, on top of one in ours.
            value += turn["raw"][case.meter] - turn["peer's raw"][case.meter]
        return value * case.scale

    def figure(self, case: Case, turn: Sides) -> float:
        """The figure of a row in one turn."""
        return FIGURES[case.figure](*(self.value(case, turn, side) or 0.0 for side in ("ours", "peer", "raw")))

    def row(self, case: Case, machine: str) -> Row:
        """The medians of all turns."""
        sides = {}
        for side in ("ours", "peer", "raw"):
            seen = [value for turn in self.turns if (value := self.value(case, turn, side)) is not None]
            sides[side] = statistics.median(seen) if seen else None
        figure = FIGURES[case.figure](*(sides[side] or 0.0 for side in ("ours", "peer", "raw")))
        spread = half_quartiles([self.figure(case, turn) for turn in self.turns])
        key = (case.group, case.name, case.unit, case.figure, case.limit)
        values = (sides["ours"], sides["peer"], sides["raw"])
        return Row(*key, *values, value=figure, spread=spread, turns=len(self.turns), machine=machine)

    def steady(self, part: float) -> bool:
        """Whether further turns would hardly move any median."""
        for case in self.rows:
            figures = [self.figure(case, turn) for turn in self.turns]
            error = half_quartiles(figures) / len(figures) ** 0.5
            if error > part * abs(statistics.median(figures)):
                return False
        return True


def interpreters(works: Sequence[Measured]) -> list[tuple[str, list[str]]]:
    """Which library each interpreter of a turn has, and the sides that it measures."""
    present = {side for measured in works for side in measured.work.sides}
    if works[0].work.once:
        return [(side, [side]) for side in ("ours", "peer", "raw") if side in present]
    added = any(case.figure == ADDED for measured in works for case in measured.rows)
    peer = [("peer", ["peer", "raw"] if added else ["peer"])] if "peer" in present else []
    return [("ours", ["ours", "raw"]), *peer]


def sessions(rows: Sequence[Case]) -> Iterator[list[Measured]]:
    """The works that the same interpreters measure: those of a group with as many processes, or one by itself."""
    works: dict[Work, Measured] = {}
    for row in rows:
        works.setdefault(row.work, Measured(row.work, [])).rows.append(row)

    def place(measured: Measured) -> tuple[str, int, int]:
        work = measured.work
        by_itself = 1 + list(works).index(work) if work.alone or work.once else 0
        return measured.rows[0].group, work.processes, by_itself

    for _, found in groupby(sorted(works.values(), key=place), key=place):
        yield list(found)


class Runner:
    """Measures rows.

    Args:
        table: all rows, in the order in which the interpreters know them.
        peer: an interpreter that has the original library.
        pace: how long.
        machine: what it is measured on.
    """

    def __init__(self, table: Sequence[Case], peer: str, pace: Pace, machine: str) -> None:
        self._positions = {case.key: position for position, case in enumerate(table)}
        self._peer = peer
        self._pace = pace
        self._machine = machine

    def measure(
        self, rows: Sequence[Case], show: Callable[[str], None], seconds: float = math.inf
    ) -> Iterator[tuple[list[Row], list[str]]]:
        """Measures rows and shows each as a line; yields what was found and what failed after each session of works.

        Args:
            rows: what to measure.
            show: called with each line.
            seconds: after them no session begins.
        """
        until = time.monotonic() + seconds
        with tempfile.TemporaryDirectory(prefix="bench-", dir=_beside()) as kept:
            for works in sessions(rows):
                cases = [(measured, case) for measured in works for case in measured.rows]
                if time.monotonic() > until:
                    yield [], [f"Not measured, because time was up: {case.name}" for _, case in cases]
                    continue
                try:
                    self._turns(works, Path(kept))
                except CannotMeasure as failure:
                    show(str(failure))
                    yield [], [str(failure)]
                    continue
                found = [measured.row(case, self._machine) for measured, case in cases]
                show("\n".join(map(line, found)))
                yield found, []

    def _turns(self, works: list[Measured], kept: Path) -> None:
        begun = time.monotonic()
        unsteady, libraries = works, interpreters(works)
        if works[0].work.once:
            # The first interpreters write the byte code, and what all turns share.
            self._turn(unsteady, libraries, kept)
        for number in range(self._pace.most):
            late = time.monotonic() - begun > self._pace.seconds
            if number >= self._pace.least and (late or not unsteady):
                return
            # The first of two finds the machine in another state, so they take turns at being first.
            order = libraries if number % 2 == 0 else libraries[::-1]
            for measured, sides in zip(unsteady, self._turn(unsteady, order, kept), strict=True):
                measured.turns.append(sides)
            if number + 1 >= self._pace.least:
                unsteady = [measured for measured in unsteady if not measured.steady(self._pace.steady)]

    def _turn(self, works: list[Measured], libraries: list[tuple[str, list[str]]], kept: Path) -> list[Sides]:
        """What one turn of interpreters found, by work."""
        found: list[Sides] = [{} for _ in works]
        for library, sides in libraries:
            for work, seen in zip(found, self._interpreter(works, library, sides, kept), strict=True):
                if library == "peer" and "raw" in seen:
                    seen["peer's raw"] = seen.pop("raw")
                work.update(seen)
        return found

    def _interpreter(self, works: list[Measured], library: str, sides: list[str], kept: Path) -> list[Sides]:
        """What one interpreter, or one group of processes, found by work.

        Raises:
            CannotMeasure: it failed.
        """
        processes = works[0].work.processes
        launch = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--rdzv-backend=c10d"]
        launch = [*launch, "--rdzv-endpoint=localhost:0"] if processes > 1 else []
        python = self._peer if library == "peer" else sys.executable
        with tempfile.TemporaryDirectory(dir=kept) as folder:
            positions = [[self._positions[case.key] for case in measured.rows] for measured in works]
            order = {"works": positions, "sides": sides, "folder": folder, "kept": str(kept)}
            done = subprocess.run(
                [python, *launch, "-m", "bench.child"],
                capture_output=True,
                text=True,
                check=False,
                env=environment(json.dumps(order)),
            )
        lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
        if done.returncode != 0 or not lines:
            names = ", ".join(repr(measured.rows[0].name) for measured in works)
            raise CannotMeasure(f"{python} could not measure {names}.\n{done.stderr[-4000:]}")
        found: list[Sides] = json.loads(lines[-1])
        return found


def _beside() -> Path | None:
    """Where files are written; None, for the folder of temporary files, where the checkout cannot be written."""
    if not os.access(ROOT, os.W_OK):
        return None
    (ROOT / ".nox").mkdir(exist_ok=True)
    return ROOT / ".nox"


def environment(order: str) -> dict[str, str]:
    """The environment of an interpreter: one thread for each process, and byte code that is kept."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")}
    # A machine that is rented for minutes has none of our packages installed.
    paths = os.pathsep.join([str(ROOT / "tools"), *filter(None, [os.environ.get("BENCH_SOURCES")])])
    own = {"BENCH_ORDER": order, "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **own}
