"""Runs tests that a client library has of its own, without a model hub: what passes with the original has to pass here.

    python own_tests.py PYTHON_OF_THE_ORIGINAL LIBRARY EXPRESSION PATTERN...

`$ACCEL_<LIBRARY>_TESTS` names the folder of the tests; without it they are those of the source distribution. Of the
files that match a pattern, the tests run that the expression selects (see `pytest -k`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

SERVED = Path(__file__).parent / "served"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
# Some tests are named for members of a set.
REPEATABLE = {"PYTHONHASHSEED": "0"}
OPTIONS = ("-q", "--tb=short", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:randomly")


def shipped_tests(library: str, where: Path) -> list[Path]:
    """The folder of tests in the source distribution of the installed release, if it has one."""
    release = ("--no-deps", "--no-binary", library, "-d", str(where), f"{library}=={version(library)}")
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *release], check=False)
    for archive in where.glob("*.tar.gz"):
        shutil.unpack_archive(archive, where, filter="data")
    return list(where.glob("*/tests"))


def outcomes(python: str, original: str, here: Path, arguments: list[str]) -> dict[tuple[str, str], str]:
    """How each test ends with one Python; only `accelerate.test_utils` is always that of the original."""
    environment = {**os.environ, **OFFLINE, **REPEATABLE, "PYTHONPATH": str(SERVED), "ACCEL_ORIGINAL_PYTHON": original}
    alone = ("-c", os.devnull, "--rootdir", str(here), "--continue-on-collection-errors", "--junitxml=outcomes.xml")
    done = subprocess.run(
        [python, "-m", "pytest", *arguments, *OPTIONS, *alone], cwd=here, env=environment, check=False
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest of {python} ended with {done.returncode}")
    cases = ElementTree.parse(here / "outcomes.xml").iter("testcase")
    return {(case.get("classname", ""), case.get("name", "")): outcome(case) for case in cases}


def outcome(case: ElementTree.Element) -> str:
    """One of "failure", "error", "skipped" and "passed"."""
    return next((part.tag for part in case if part.tag in ("failure", "error", "skipped")), "passed")


def main(original: str, library: str, expression: str, *patterns: str) -> int | str:
    given = os.environ.get(variable := f"ACCEL_{library.upper()}_TESTS")
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        for folder in [Path(given)] if given else shipped_tests(library, here):
            shutil.copytree(folder, here / "tests")
            (here / "tests" / "__init__.py").touch()  # source distributions leave it out
        files = sorted(str(file.relative_to(here)) for one in patterns for file in here.glob(f"tests/{one}"))
        if not files:
            print(f"SKIPPED: tests of {library} itself: none shipped or fetched; {variable} names no folder of them")
            return 0
        both = [outcomes(one, original, here, [*files, "-k", expression]) for one in (original, sys.executable)]
    there, ours = ({test for test, ended in one.items() if ended == "passed"} for one in both)
    counts = f"{len(there)} of {len(both[0])} pass with the original, {len(ours)} of {len(both[1])} here"
    print(f"tests of {library} itself, -k '{expression}', in {', '.join(files)}: {counts}")
    # pytest names a file that it cannot import as a test without a class.
    if unread := [name for (where, name), ended in both[0].items() if not where and ended == "error"]:
        return f"these files cannot be imported with the original: {unread}"
    if not there:
        return "no test passes with the original"
    return f"these pass with the original alone: {sorted(there - ours)}" if there - ours else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
