"""Rules for modules that no linter knows: docstrings, names, and that nothing points outside the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from symtable import Function, SymbolTable, symtable

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


def recursive_closures(table: SymbolTable) -> Iterator[str]:
    """Nested functions that refer to themselves, with their lines."""
    for child in table.get_children():
        if isinstance(child, Function) and child.get_name() in child.get_frees():
            yield f"{child.get_name()} in line {child.get_lineno()}"
        yield from recursive_closures(child)


def test_no_function_keeps_its_variables_in_a_reference_cycle() -> None:
    """A nested function that calls itself is such a cycle: tensors in its variables wait for the garbage collector."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("packages/*/src/**/*.py"))}
    cycles = {path: list(recursive_closures(symtable(text, str(path), "exec"))) for path, text in sources.items()}
    assert {str(path): names for path, names in cycles.items() if names} == {}


def test_a_nested_function_that_calls_itself_is_seen() -> None:
    text = "def f(x):\n def plain():\n  return x\n def walk(v):\n  return walk(v) or x\n return walk(plain())\n"
    assert list(recursive_closures(symtable(text, "f.py", "exec"))) == ["walk in line 4"]
