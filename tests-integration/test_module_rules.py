"""Rules for modules that no linter knows: docstrings, names, and that nothing points outside the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

from accel_state.library import OWN_PACKAGES

ROOT = Path(__file__).resolve().parents[1]
MODULES = [*sorted(ROOT.glob("packages/*/src/**/*.py")), *sorted(ROOT.glob("tools/**/*.py")), ROOT / "noxfile.py"]

VAGUE = {"common", "core", "helpers", "misc", "other", "utils"}

# Its module names are given: they are those of the library that it replaces.
GIVEN_NAMES = ROOT / "packages/accelerate/src"

OUTSIDE = re.compile(r"\.\./shared\b|(?<![\w.])/work/|\bfile:///|\bindex-url\b")


def test_a_module_says_what_it_is_for() -> None:
    silent = [path for path in MODULES if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    assert silent == [], "a module opens with what it is for"


def test_no_module_has_a_vague_name() -> None:
    named = (path for path in MODULES if GIVEN_NAMES not in path.parents)
    parts = {(path, part) for path in named for part in path.relative_to(ROOT).with_suffix("").parts}
    assert sorted(str(path) for path, part in parts if part in VAGUE) == []


def test_the_packages_of_this_project_are_listed() -> None:
    assert {path.name for path in ROOT.glob("packages/*/src/accel_*")} == OWN_PACKAGES


def test_nothing_points_outside_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name and ROOT / name != Path(__file__)]
    files = [path for path in paths if path.is_file()]
    assert [str(path) for path in files if OUTSIDE.search(path.read_text(encoding="utf-8", errors="ignore"))] == []
