"""Mutation testing: change the code in small ways, and see whether tests notice.

    python tools/mutants.py run [ID...]          draw mutants, run them, and add to what an earlier run left
    python tools/mutants.py again ID...          run some again, with the current tests of the checkout
    python tools/mutants.py control              run the tests that failed on the unchanged code, where they must pass
    python tools/mutants.py show ID              a mutant as a difference
    python tools/mutants.py write                write the figures and the survivors to docs/reliability.md
    python tools/mutants.py check                exit 1 when a survivor there has no judgement, or too many survive

A run takes an hour or more on one core, and continues after an interruption. The checkout is not changed: a copy of it
and the results are in a folder that `--work` names. Write the judgement of a survivor by hand into the brackets of its
entry in the document; `write` keeps it.

No library replaces this: no command of mutmut 3 or cosmic-ray 8 samples by area or records judgements, and the code
that lets a mutant take seconds (a fork with torch imported, the lines that child processes execute) would remain here.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import mutants_running as running
from mutants_operators import Change, changes, compiles
from mutants_report import DOCUMENT, Result, problems, write

ROOT: Final = Path(__file__).resolve().parents[1]
SEED: Final = 21
EACH: Final = 100
"""Mutants of each area."""


def _sources(package: str, *names: str) -> list[str]:
    return [f"packages/{package.replace('_', '-')}/src/{package}/{name}.py" for name in names]


def _tests(package: str, *names: str) -> list[str]:
    return [f"packages/{package}/tests/{name}.py" for name in names]


AREAS: Final[Mapping[str, Sequence[str]]] = {
    "plan arithmetic": [
        *_sources("accel_data", "batches", "dispatch", "padding", "prepare", "sharding"),
        *_sources("accel_bigmodel", "device_map", "placement", "sizes"),
    ],
    "collectives": [
        *_sources("accel_ops", "agreement", "checked_call", "collectives", "objects", "packing", "pending"),
        *_sources("accel_ops", "reduction", "shape", "tree"),
        *_sources("accel_state", "protocol/call", "protocol/description", "protocol/exchange", "protocol/header"),
        *_sources("accel_state", "protocol/state", "protocol/turn", "transport/torch_dist"),
    ],
    "accumulation": [
        *_sources("accel_state", "gradient"),
        *_sources("accel_plugins", "ddp/strategy", "wrapped/optimizer", "wrapped/scheduler"),
        *_sources("accel_torch", "accelerator/training", "accumulation", "local_sgd", "step", "weighting"),
    ],
    "commit": _sources(
        "accel_plugins",
        *("checkpoint/background", "checkpoint/boundaries", "checkpoint/commit", "checkpoint/manifest"),
        *("checkpoint/finalize", "checkpoint/foreign_files", "checkpoint/locks", "checkpoint/models"),
        *("checkpoint/recovery", "checkpoint/retention", "checkpoint/state"),
    ),
}
"""What is changed, by area."""

TESTS: Final[Mapping[str, Sequence[str]]] = {
    "plan arithmetic": [
        *_tests(
            "accel-data",
            "test_batch_*",
            "test_loader_[bcdfs]*",
            "test_loaders_*",
            "test_shard_plan",
            "test_stream_*",
            "test_step_*",
        ),
        *_tests("accel-data", "test_thousands_of_processes"),
        *_tests("accel-bigmodel", "test_byte_counts", "test_d*", "test_[ef]*", "test_module_sizes"),
    ],
    "collectives": [
        *_tests("accel-ops", "test_*"),
        *_tests("accel-state", "test_control_store", "test_transport_over_gloo"),
    ],
    "accumulation": [
        *_tests("accel-state", "test_gradient_state"),
        *_tests("accel-plugins", "test_ddp_*", "test_late_*", "test_schedule_*", "test_single_*", "test_wrapped_*"),
        *_tests("accel-torch", "test_accelerator_alone", "test_accelerator_on_two", "test_local_sgd", "test_misuse"),
        *_tests("accel-torch", "test_models_*", "test_short_*", "test_token_weights", "test_unusual_optimizers"),
    ],
    "commit": [
        *_tests("accel-plugins", "test_checkpoint_*", "test_hostile_*", "test_partial_*", "test_ranges_*"),
        *_tests(
            "accel-torch", "test_verified_loads", "test_saving_behind", "test_loads_before_prepare", "test_failures_*"
        ),
        *_tests("accel-torch", "test_changed_bytes"),
    ],
}
"""Files of tests that are measured before an area is run; a mutant is run with tests of all measured files."""

FIRST: Final = 3.0
"""Seconds of tests that run first for a mutant."""
MOST: Final = 6.0
"""Seconds of tests after which a mutant counts as a survivor, unless it is run again."""


@dataclass(frozen=True)
class Mutant:
    """A change of a module.

    Args:
        id: area and number.
        area: the area of its module.
        file: the module.
        change: the change.
    """

    id: str
    area: str
    file: str
    change: Change


class Workshop:
    """A folder with a copy of the repository, its mutants, the lines that its tests execute, and the results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.copy = running.Copy(folder / "tree")
        self.copy.root.mkdir(parents=True, exist_ok=True)
        self.copy.take(ROOT)
        self.mutants = {mutant.id: mutant for mutant in self._drawn()}
        files = sorted(file for files in AREAS.values() for file in files)
        counts = {str(self.copy.root / file): self._read(file).count(b"\n") + 1 for file in files}
        self.lines = running.Lines(counts)
        self._measured = folder / "measured.json"
        self.measured: dict[str, Any] = json.loads(self._measured.read_text()) if self._measured.exists() else {}

    def _read(self, file: str) -> bytes:
        return (self.copy.root / file).read_bytes()

    # ------------------------------------------------------------ mutants
    def _drawn(self) -> list[Mutant]:
        drawn = self.folder / "drawn.json"
        if not drawn.exists():
            drawn.write_text(json.dumps([asdict(mutant) for area in AREAS for mutant in self._draw(area)], indent=1))
        rows = json.loads(drawn.read_text())
        return [Mutant(**{**row, "change": _change(row["change"])}) for row in rows]

    def _draw(self, area: str) -> list[Mutant]:
        possible = [(file, change) for file in AREAS[area] for change in changes(self._read(file))]
        random.Random(f"{SEED} {area}").shuffle(possible)
        found: list[Mutant] = []
        for file, change in possible:
            if len(found) < EACH and compiles(change.apply(self._read(file))):
                found.append(Mutant(f"{area.split()[0]}-{len(found)}", area, file, change))
        print(f"{area}: {len(possible)} possible changes", flush=True)
        return found

    def possible(self) -> int:
        """The number of changes that mutants were drawn from."""
        return sum(len(changes(self._read(file))) for files in AREAS.values() for file in files)

    def difference(self, mutant: Mutant) -> str:
        """A mutant as a difference."""
        before = self._read(mutant.file)
        old, new = (text.decode().splitlines() for text in (before, mutant.change.apply(before)))
        return "\n".join(difflib.unified_diff(old, new, mutant.file, mutant.file, n=2, lineterm=""))

    # ------------------------------------------------------------ tests
    def measure(self, area: str | None, again: bool = False) -> None:
        """Measures the lines that tests execute: of files not measured yet or, with `again`, of changed ones."""
        patterns = [pattern for name, found in TESTS.items() if area in (name, None) for pattern in found]
        for file in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
            name = str(file.relative_to(ROOT))
            text = file.read_bytes()
            digest = hashlib.sha256(text).hexdigest()
            known = self.measured.get(name)
            if (known is None or known["digest"] == digest) if again else known is not None:
                continue
            (self.copy.root / name).write_bytes(text)
            begun = time.monotonic()
            tests = running.measure(self.copy, self.lines, name, 300.0)
            self.measured[name] = {"digest": digest, "tests": [asdict(test) for test in tests]}
            self._measured.write_text(json.dumps(self.measured))
            print(f"{name}: {len(tests)} tests, {time.monotonic() - begun:.0f} s", flush=True)

    def tests_of(self, mutant: Mutant) -> dict[str, float]:
        """Seconds of the tests that execute a mutant; cheap ones first, and those of its own package before others."""
        file = str(self.copy.root / mutant.file)
        first, last = (1, self._read(mutant.file).count(b"\n")) if mutant.change.once else mutant.change.lines
        wanted = set(range(self.lines.place(file, first), self.lines.place(file, last) + 1))
        package = mutant.file.partition("/src/")[0]
        ranked: list[tuple[tuple[int, bool, float], str, float]] = []
        for name, found in self.measured.items():
            executing = [test for test in found["tests"] if not wanted.isdisjoint(test["lines"])]
            executing.sort(key=lambda test: float(test["seconds"]))
            for place, test in enumerate(executing):
                rank = (place // 3, not name.startswith(package), test["seconds"])
                ranked.append((rank, test["name"], test["seconds"]))
        return {name: seconds for _, name, seconds in sorted(ranked)}

    # ------------------------------------------------------------ runs
    def results(self) -> dict[str, Result]:
        """The last result of each mutant."""
        log = self.folder / "results.jsonl"
        rows = [json.loads(row) for row in log.read_text().splitlines()] if log.exists() else []
        return {row["id"]: Result(**row) for row in rows}

    def ordered(self) -> list[Result]:
        """The last results, in the order of the areas."""
        found = self.results()
        return [found[name] for name in self.mutants if name in found]

    def run(self, mutant: Mutant, most: float) -> Result:
        """Try a mutant with the tests that execute it."""
        source = self._read(mutant.file)
        tests = self.tests_of(mutant)
        begun = time.monotonic()
        verdict, test, tried = "survived" if tests else "not executed", "", 0
        with running.changed(self.copy.root / mutant.file, mutant.change.apply(source)):
            for part in _parts(tests, most):
                tried += len(part)
                ended = self._run_tests(part)
                if not ended.passed:
                    verdict, test = "hung" if ended.hung else "killed", ended.test
                    (self.folder / "output").mkdir(exist_ok=True)
                    (self.folder / "output" / f"{mutant.id}.txt").write_text(ended.output)
                    break
        line = source[: mutant.change.start].count(b"\n") + 1
        old = source[mutant.change.start : mutant.change.stop].decode()
        result = Result(
            *(mutant.id, mutant.area, mutant.file, line, source.decode().splitlines()[line - 1].strip()),
            *(mutant.change.operator, old, mutant.change.new, verdict, test),
            *(tried, len(tests), round(time.monotonic() - begun, 1)),
        )
        with (self.folder / "results.jsonl").open("a") as log:
            log.write(json.dumps(asdict(result)) + "\n")
        print(f"{mutant.id} {verdict} {result.seconds} s {tried}/{len(tests)} {mutant.file}:{line} {test}", flush=True)
        return result

    def _run_tests(self, tests: Mapping[str, float]) -> running.Ended:
        """Run tests, with much more time than they took when they were measured."""
        each = max(20.0, 10 * max(tests.values()))
        return running.run_tests(self.copy, list(tests), each + 20 + 6 * sum(tests.values()), each)


def _change(row: dict[str, Any]) -> Change:
    return Change(**{**row, "lines": tuple(row["lines"])})


def _parts(tests: Mapping[str, float], most: float) -> list[dict[str, float]]:
    """The tests that are run first, and the others, each in the order of their files."""
    first: dict[str, float] = {}
    second: dict[str, float] = {}
    spent = 0.0
    for name, seconds in tests.items():
        if spent + seconds <= FIRST or not first:
            first[name] = seconds
        elif spent + seconds <= most:
            second[name] = seconds
        else:
            continue
        spent += seconds
    return [_by_file(part) for part in (first, second) if part]


def _by_file(tests: Mapping[str, float]) -> dict[str, float]:
    """Files in the order in which they come first, so that processes of a file are started once."""
    files: dict[str, list[str]] = {}
    for name in tests:
        files.setdefault(name.partition("::")[0], []).append(name)
    return {name: tests[name] for names in files.values() for name in names}


def _control(workshop: Workshop) -> int:
    """Run each test that failed on a mutant on the unchanged code."""
    failed = {result.test for result in workshop.results().values() if result.test}
    tests = {test["name"]: test["seconds"] for found in workshop.measured.values() for test in found["tests"]}
    wrong = 0
    for file in sorted({name.partition("::")[0] for name in failed}):
        names = [name for name in tests if name in failed and name.startswith(file)]
        ended = running.run_tests(workshop.copy, names or [file], 600, 200)
        wrong += not ended.passed
        print(f"{file}: {len(names)} tests {'pass' if ended.passed else 'FAIL ' + ended.test}", flush=True)
    return 1 if wrong else 0


def _run_all(workshop: Workshop, names: Sequence[str]) -> int:
    """Run what has no result yet; names are those of mutants or their first letters, and all when there are none."""
    for area in AREAS:
        if not any(area.startswith(name.partition("-")[0]) for name in names or [""]):
            continue
        workshop.measure(area)
        done = workshop.results()
        for mutant in workshop.mutants.values():
            if mutant.area == area and mutant.id not in done and mutant.id.startswith(tuple(names) or ""):
                workshop.run(mutant, MOST)
    return 0


def _run_again(workshop: Workshop, names: Sequence[str], most: float) -> int:
    workshop.measure(None, again=True)
    for name in names:
        workshop.run(workshop.mutants[name], most)
    return 0


def _check() -> int:
    wrong = problems(DOCUMENT.read_text(encoding="utf-8"))
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


def main() -> int:
    """Runs the command in the first argument."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "again", "control", "show", "write", "check"))
    parser.add_argument("ids", nargs="*", metavar="ID")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "accel-mutants")
    parser.add_argument(
        "--most", type=float, default=600.0, help="seconds of tests that `again` runs for a mutant, at most"
    )
    parser.add_argument("--anew", action="store_true", help="delete the results of earlier runs")
    arguments = parser.parse_intermixed_args()
    if arguments.command == "check":
        return _check()
    if arguments.anew:
        shutil.rmtree(arguments.work, ignore_errors=True)
    workshop = Workshop(arguments.work)
    if arguments.command == "show":
        print("\n".join(workshop.difference(workshop.mutants[name]) for name in arguments.ids))
        return 0
    if arguments.command == "write":
        write(workshop.ordered(), workshop.possible())
        return 0
    running.become_warm(workshop.copy)
    if arguments.command == "run":
        return _run_all(workshop, arguments.ids)
    return _control(workshop) if arguments.command == "control" else _run_again(workshop, arguments.ids, arguments.most)


if __name__ == "__main__":
    sys.exit(main())
