"""Change fragments: one small file for each change that users notice, until a release collects them.

    packages/accel-ops/changes/+packed-reduce.feature.md

The name after the `+` is free, the kind decides how far the version moves, and the text becomes one item of the
package's CHANGELOG.md. Towncrier collects them, by the settings in the package's pyproject.toml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import tomli

from releasing.workspace import Package, Step

KINDS = {
    "breaking": Step.BREAKING,
    "feature": Step.FEATURE,
    "fix": Step.FIX,
    "performance": Step.FIX,
    "dependency": Step.FIX,
    "internal": Step.FIX,
}

UNTOLD = "internal"
"""The kind of a change that users do not notice: a reason for a release, and no line in the changelog."""

WAIVERS = "waivers.toml"
LONGEST_LINE = 120
NAME = re.compile(r"\+(?P<what>[a-z0-9]+(?:-[a-z0-9]+)*)\.(?P<kind>[a-z]+)\.md")


@dataclass(frozen=True)
class Fragment:
    """One change that a release will tell of."""

    path: Path
    kind: str
    text: str

    @property
    def step(self) -> Step:
        """How far it moves the version."""
        return KINDS[self.kind]

    @property
    def headline(self) -> str:
        """Its beginning, on one line."""
        return shorten(self.text, 100, placeholder=" ...")


def read_fragments(package: Package) -> tuple[Fragment, ...]:
    """The well-formed fragments of a package, by name."""
    found = []
    for path in fragment_files(package):
        named = NAME.fullmatch(path.name)
        if named and named["kind"] in KINDS:
            found.append(Fragment(path, named["kind"], path.read_text(encoding="utf-8")))
    return tuple(found)


def fragment_files(package: Package) -> list[Path]:
    """Everything in the folder of fragments that should be one."""
    kept = {WAIVERS, ".gitignore"}
    return sorted(path for path in package.changes.glob("*") if path.name not in kept)


def fragment_problems(package: Package) -> Iterator[str]:
    """One line for each fragment that is not well formed, and for settings of towncrier that do not fit."""
    for path in fragment_files(package):
        for fault in faults(path):
            yield f"{package.name}: changes/{path.name}: {fault}"
    yield from settings_problems(package)


def faults(path: Path) -> Iterator[str]:
    """What is wrong with one fragment."""
    named = NAME.fullmatch(path.name)
    if named is None:
        yield "its name is not of the form +what-changed.kind.md, in small letters and hyphens"
        return
    if named["kind"] not in KINDS:
        yield f"there is no kind {named['kind']!r}; the kinds are {', '.join(KINDS)}"
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if not text.strip():
        yield "it is empty"
        return
    if not text.endswith("\n") or text != text.strip() + "\n":
        yield "it must begin with its text and end with one line break"
    if lines[0].startswith(("-", "*", "#", "+")):
        yield "it must be plain sentences; towncrier makes a list of them"
    if lines[0][0].islower() or not text.rstrip().endswith("."):
        yield "it must be whole sentences"
    if any(len(line) > LONGEST_LINE for line in lines):
        yield f"a line is longer than {LONGEST_LINE} characters"


def settings_problems(package: Package) -> Iterator[str]:
    """What the settings of towncrier must say so that every kind is collected, and into the right file."""
    project: dict[str, Any] = tomli.loads((package.folder / "pyproject.toml").read_text(encoding="utf-8"))
    settings = project.get("tool", {}).get("towncrier", {})
    expected = {"name": package.name, "directory": "changes", "filename": "CHANGELOG.md"}
    for key, value in expected.items():
        if settings.get(key) != value:
            yield f"{package.name}: [tool.towncrier] must have {key} = {value!r}"
    told = [kind for kind in KINDS if kind != UNTOLD]
    if list(settings.get("fragment", {})) != told:
        yield f"{package.name}: [tool.towncrier.fragment] must have the kinds {', '.join(told)}"
    marker = settings.get("start_string", "")
    changelog = package.folder / "CHANGELOG.md"
    if not marker or not changelog.is_file() or marker not in changelog.read_text(encoding="utf-8"):
        yield f"{package.name}: CHANGELOG.md must have the line that start_string names"
