"""Mutation testing by cosmic-ray: change the code in small ways, and see whether tests notice.

    python tools/mutants.py run [AREA...]   draw mutants, try them, and add to what an earlier run left
    python tools/mutants.py again           try all survivors again, with the current tests of the checkout
    python tools/mutants.py write           write the figures and the survivors to docs/reports/mutants.md
    python tools/mutants.py check           exit 1 when a survivor there has no judgement, or too many survive

A run takes hours on one core, and continues after an interruption. A clone of the last commit, the sessions of
cosmic-ray and the measured tests are in `.nox/mutants`, which you remove to draw others. For each mutant cosmic-ray
calls `mutants.py test`, which runs the files of tests that execute the changed line, the quickest first. Write the
judgement of a survivor by hand into the brackets of its entry in the report; `write` keeps it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, NamedTuple

import tomli

ROOT: Final = Path(__file__).resolve().parents[1]
REPORT: Final = ROOT / "docs" / "reports" / "mutants.md"
SETTINGS: Final[Mapping[str, Any]] = tomli.loads((ROOT / "tools" / "mutants.toml").read_text(encoding="utf-8"))
AREAS: Final[Mapping[str, Any]] = SETTINGS["areas"]
WORK: Final = ROOT / ".nox" / "mutants"
TREE: Final = WORK / "tree"
MEASURED: Final = WORK / "measured.json"
LINES: Final = WORK / "lines"

LEAST: Final = 85
"""Percent of the mutants that tests have to notice."""
MOST: Final = 60.0
"""Seconds of files of tests after which a mutant counts as a survivor."""
LIMIT: Final = 600.0
"""Seconds after which the tests of a mutant hang."""
NOT_DRAWN: Final = "not drawn"
UNJUDGED: Final = "not judged yet"

HEAD: Final = """# Which changes of the code tests notice

`nox -s mutants` writes this page. A *mutant* is the code with one small change by cosmic-ray: another comparison or
arithmetic operator, `and` for `or`, a negated condition, a number one higher or lower, another exception, a loop
without its turns, `break` for `continue`, or a removed decorator. {drawn} mutants are drawn at random out of {possible}
possible ones, equally many from each area. Lines with formatted texts are not changed.

The files of tests that execute the changed line run against each mutant, the quickest first, until one fails or hangs;
both count as noticed. Tests marked `slow` and tests that need a GPU or another library are left out. Only files that
take a minute together ran against each survivor; "not tested" means that these do not notice it.

"""
_UNCHANGED: Final = re.compile(r"TYPE_CHECKING|\bf[\"']")
"""Lines that are not changed: formatted texts, such as those of errors, and what only type checkers read."""
_FIGURES: Final = re.compile(r"^\| \*\*all\*\* \|(?: [^|]+ \|)+ (\d+) \| \*\*([\d.]+) %\*\* \|$", re.MULTILINE)
_SURVIVOR: Final = re.compile(r"^- (`[^`]+\.py`): (`.+?`)\n  (.+?)\n  \((.+?)\)$", re.MULTILINE)


class Result(NamedTuple):
    """A mutant that was tried.

    Args:
        area: the area of its module.
        module: the module, as it is imported.
        old: the line before.
        new: the line after.
        noticed: whether a test failed.
    """

    area: str
    module: str
    old: str
    new: str
    noticed: bool


# ---------------------------------------------------------------- a run
def run(names: Sequence[str]) -> int:
    """Try the mutants of areas that have no result yet; all areas without a name."""
    WORK.mkdir(parents=True, exist_ok=True)
    if not TREE.exists():
        subprocess.run(["git", "clone", "-q", "--shared", ROOT, TREE], check=True)
    # An interrupted run left a changed module there.
    subprocess.run(["git", "checkout", "-q", "--", ":(glob)packages/*/src/**"], cwd=TREE, check=True)
    take_tests()
    for area in names or AREAS:
        measure(AREAS[area]["tests"])
        session, settings = session_of(area), WORK / f"{area.split()[0]}.toml"
        settings.write_text(_settings(AREAS[area]["modules"]), encoding="utf-8")
        if not session.exists():
            _in_tree("cosmic-ray", "init", settings, session)
            _in_tree("cr-filter-operators", session, settings)
            draw(session, SETTINGS["each"], area)
        _in_tree("cosmic-ray", "exec", settings, session)
    return 0


def again() -> int:
    """Forget the results of survivors, and run."""
    for area in filter(lambda area: session_of(area).exists(), AREAS):
        with closing(sqlite3.connect(session_of(area))) as database, database:
            database.execute("DELETE FROM work_results WHERE test_outcome = 'SURVIVED'")
    return run([])


def session_of(area: str) -> Path:
    """Where cosmic-ray keeps the mutants of an area."""
    return WORK / f"{area.split()[0]}.sqlite"


def _settings(modules: Sequence[str]) -> str:
    """The settings of cosmic-ray, which are written in TOML as JSON writes strings and lists."""
    command = f"{sys.executable} {Path(__file__)} test"
    return f"""[cosmic-ray]
module-path = {json.dumps(modules)}
timeout = {LIMIT}
excluded-modules = []
test-command = {json.dumps(command)}
[cosmic-ray.distributor]
name = "local"
[cosmic-ray.filters.operators-filter]
exclude-operators = {json.dumps(SETTINGS["exclude-operators"])}
"""


def _in_tree(program: str, *arguments: object) -> int:
    """Run a program of this environment on the clone, whose packages are imported in place of the installed ones."""
    sources = os.pathsep.join(sorted(map(str, TREE.glob("packages/*/src"))))
    environment = {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(Path(sys.executable).parent / program), *map(str, arguments)]
    return subprocess.run(command, cwd=TREE, env=environment, check=False).returncode


def draw(session: Path, count: int, seed: str) -> None:
    """Mark all but some mutants of a session as skipped: at most one of each place, at random, and none of a text."""
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import WorkerOutcome, WorkResult

    with use_db(str(session), WorkDB.Mode.open) as database:
        pending = sorted(database.pending_work_items, key=lambda item: _identity(item.mutations[0]))
        texts = {item.job_id for item in pending if _UNCHANGED.search(_changed_line(item.mutations[0]))}
        database.set_multiple_results(texts, WorkResult(worker_outcome=WorkerOutcome.SKIPPED, output="a text"))
        possible = [item for item in pending if item.job_id not in texts]
        random.Random(seed).shuffle(possible)
        places = {_identity(item.mutations[0])[:2]: item.job_id for item in possible}
        left_out = {item.job_id for item in possible}.difference(list(places.values())[:count])
        database.set_multiple_results(left_out, WorkResult(worker_outcome=WorkerOutcome.SKIPPED, output=NOT_DRAWN))


def _changed_line(mutation: Any) -> str:
    number: int = mutation.start_pos[0]
    return (TREE / str(mutation.module_path)).read_text(encoding="utf-8").splitlines()[number - 1]


def _identity(mutation: Any) -> tuple[str, Any, str, int]:
    return str(mutation.module_path), mutation.start_pos, mutation.operator_name, mutation.occurrence


# ---------------------------------------------------------------- tests
def take_tests() -> None:
    """Copy the tests of the checkout into the clone; those that have changed are measured again."""
    measured = _measured()
    for path in sorted({path for area in AREAS.values() for name in area["tests"] for path in ROOT.glob(name)}):
        copy = TREE / path.relative_to(ROOT)
        if not copy.exists() or copy.read_bytes() != path.read_bytes():
            copy.write_bytes(path.read_bytes())
            measured.pop(str(path.relative_to(ROOT)), None)
    _write_measured(measured)


def measure(patterns: Sequence[str]) -> None:
    """Measure how long each file of tests takes, and which lines it executes in any process, unless that is known."""
    measured = _measured()
    for file in sorted(str(path.relative_to(TREE)) for pattern in patterns for path in TREE.glob(pattern)):
        if file in measured:
            continue
        begun = time.monotonic()
        arguments = ("--rcfile", "pyproject.toml", "--data-file", WORK / "parts" / LINES.name, "--context", file)
        code = _in_tree("coverage", "run", *arguments, "-m", "pytest", *_OPTIONS, file)
        # A file that fails, or whose tests all need another library, is tried on no mutant.
        measured[file] = round(time.monotonic() - begun, 1) if code == 0 else None
        print(f"{file}: {'left out' if code else f'{measured[file]} s'}", flush=True)
        _write_measured(measured)
    if list((WORK / "parts").glob(f"{LINES.name}*")):
        _in_tree("coverage", "combine", "-q", "--append", "--data-file", LINES, WORK / "parts")


_OPTIONS: Final = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", "not slow")


def _measured() -> dict[str, float | None]:
    return dict(json.loads(MEASURED.read_text(encoding="utf-8"))) if MEASURED.exists() else {}


def _write_measured(measured: Mapping[str, float | None]) -> None:
    MEASURED.write_text(json.dumps(measured, indent=1), encoding="utf-8")


def test() -> int:
    """Run the tests of the change that is in the clone, which is the current folder."""
    command = ["git", "diff", "-U0", "--", ":(glob)packages/*/src/**"]
    difference = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    files = tests_of(difference)
    # The exit code says that the mutant survived where no test executes it.
    return subprocess.run([sys.executable, "-m", "pytest", *_OPTIONS, *files], check=False).returncode if files else 0


def tests_of(difference: str) -> list[str]:
    """The files of tests that execute the first changed line, the quickest first."""
    from coverage import CoverageData

    file = re.search(r"^--- a/(.+)$", difference, re.MULTILINE)
    line = re.search(r"^@@ -(\d+)", difference, re.MULTILINE)
    assert file is not None
    assert line is not None
    data = CoverageData(str(LINES))
    data.read()
    executing = data.contexts_by_lineno(str(TREE / file[1])).get(int(line[1]), [])
    seconds = {name: spent for name, spent in _measured().items() if spent is not None and name in executing}
    chosen, total = list[str](), 0.0
    for name in sorted(seconds, key=lambda name: seconds[name]):
        total += seconds[name]
        if total <= MOST or not chosen:
            chosen.append(name)
    return chosen


# ---------------------------------------------------------------- the report
def results() -> tuple[list[Result], int]:
    """What was tried in all areas, and how many mutants were possible."""
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import TestOutcome

    found, possible = list[Result](), 0
    for area in AREAS:
        with use_db(str(session_of(area)), WorkDB.Mode.open) as database:
            done = list(database.completed_work_items)
        possible += sum(result.output == NOT_DRAWN or _is_tried(result) for _, result in done)
        for item, result in done:
            if not _is_tried(result):
                continue
            old, new = (_line(result.diff or "", sign) for sign in "-+")
            module = str(item.mutations[0].module_path).partition("/src/")[2]
            found.append(Result(area, module, old, new, result.test_outcome != TestOutcome.SURVIVED))
    return found, possible


def _is_tried(result: Any) -> bool:
    """Whether tests ran on a mutant that can be imported."""
    return result.test_outcome is not None and result.test_outcome != "incompetent"


def _line(difference: str, sign: str) -> str:
    """The first line that a difference removes or adds."""
    lines = (line for line in difference.splitlines() if line.startswith(sign) and not line.startswith(sign * 3))
    return next(lines, sign)[1:].strip()


def document(found: Sequence[Result], possible: int, judged: Mapping[tuple[str, str, str], str]) -> str:
    """The text of the report.

    Args:
        found: all mutants that were tried.
        possible: out of how many they were drawn.
        judged: what survivors mean, by module, line and change.
    """
    rows = [
        _figures(area, [one for one in found if one.area == area]) for area in dict.fromkeys(row.area for row in found)
    ]
    survivors = sorted((one.module, one.old, one.new) for one in found if not one.noticed)
    entries = []
    for module, old, new in survivors:
        key = (f"`{module}`", f"`{old}`", f"becomes `{new}`")
        entries.append(f"- {key[0]}: {key[1]}\n  {key[2]}\n  ({judged.get(key, UNJUDGED)})")
    where = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    return "\n".join(
        [
            HEAD.format(drawn=len(found), possible=possible) + "| Area | Modules | Mutants | Survived | Noticed |",
            "| --- | ---: | ---: | ---: | ---: |",
            *rows,
            _figures("**all**", found, "**"),
            f"\nMeasured on {time.strftime('%Y-%m-%d')} with {where}. These are all that survived, each with the line "
            "before and after, and what it means:\n",
            *entries,
            "",
        ]
    )


def _figures(area: str, found: Sequence[Result], bold: str = "") -> str:
    survived = sum(not one.noticed for one in found)
    percent = 100 * (1 - survived / len(found))
    modules = len({one.module for one in found})
    return f"| {area} | {modules} | {len(found)} | {survived} | {bold}{percent:.1f} %{bold} |"


def judgements(text: str) -> Iterator[tuple[tuple[str, str, str], str]]:
    """The survivors of a report by module, line and change, each with what it means."""
    for module, line, change, judgement in _SURVIVOR.findall(text):
        yield (module, line, change), judgement


def problems(text: str) -> list[str]:
    """What is wrong with a report: no figures, too many survivors, or some not listed or without a judgement."""
    figures = _FIGURES.search(text)
    if figures is None:
        return ["there are no figures of mutants"]
    survivors = list(judgements(text))
    wrong = [f"{module} {change}: {UNJUDGED}" for (module, _, change), told in survivors if told == UNJUDGED]
    if len(survivors) != int(figures[1]):
        wrong.append(f"{figures[1]} survived, {len(survivors)} are listed")
    return [*wrong, *([f"only {figures[2]} % are noticed"] if float(figures[2]) < LEAST else [])]


def write() -> int:
    """Write the report, with the judgements that are there."""
    judged = dict(judgements(REPORT.read_text(encoding="utf-8")))
    REPORT.write_text(document(*results(), judged), encoding="utf-8")
    return 0


def check() -> int:
    """Print what is wrong with the report."""
    wrong = problems(REPORT.read_text(encoding="utf-8"))
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = {"again": again, "test": test, "write": write, "check": check}
    parser.add_argument("command", choices=["run", *commands])
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"{', '.join(AREAS)}; all without any")
    options = parser.parse_args()
    if unknown := set(options.areas) - set(AREAS):
        parser.error(f"there is no area {unknown.pop()!r}; the areas are {', '.join(AREAS)}")
    return run(options.areas) if options.command == "run" else commands[options.command]()


if __name__ == "__main__":
    sys.exit(main())
