"""Check that built wheels and sdists contain exactly the files that git has, with the right metadata.

    python tools/check_distributions.py FOLDER [repository]

A wheel must have exactly the files below a package's `src`, the stubs that a build writes, `py.typed` and the licence;
an sdist also the tests and the files that it is built from. Both must name the supported Python, and require other
packages by ranges.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import tomli
from packaging.requirements import Requirement

from accelerate.names import NAMES, stub_path

ROOT = Path(__file__).resolve().parents[1]

# What the build adds to an sdist of its own.
ADDED_TO_SDIST = {".gitignore", "PKG-INFO", "setup.cfg"}
BUILD_FILES = ("MANIFEST.in", "pyproject.toml", "setup.py")
BESIDE_SOURCES = ("CHANGELOG.md", "LICENSE", "README.md", *BUILD_FILES, "src/", "tests/")


@dataclass(frozen=True)
class Distribution:
    """One built file, and the package that it was built from."""

    path: Path
    folder: Path
    """The package's folder."""
    files: frozenset[str]
    """Its files, by their names in the package's folder."""
    own: frozenset[str]
    """Its files of metadata, by their names in the distribution."""
    metadata: Message

    def problems(self, python: str, siblings: frozenset[str]) -> Iterator[str]:
        """One line for each thing that is not right."""
        expected = frozenset(tracked(self.folder, ("src/",) if self.is_wheel else BESIDE_SOURCES))
        if self.is_wheel and self.folder.name == "accelerate":
            expected |= {f"src/{stub_path(address)}" for address in NAMES}
        for name in sorted(expected - self.files):
            yield f"{name} is missing"
        for name in sorted(self.files - expected):
            yield f"{name} does not belong there"
        if not any(name.endswith("/py.typed") for name in self.files):
            yield "it has no py.typed, so that nobody sees its types"
        if self.is_wheel and not any(name.endswith("licenses/LICENSE") for name in self.own):
            yield "it has no licence"
        yield from self.faults_of_metadata(python, siblings)

    @property
    def is_wheel(self) -> bool:
        """Whether it is a wheel; otherwise it is an sdist."""
        return self.path.suffix == ".whl"

    def faults_of_metadata(self, python: str, siblings: frozenset[str]) -> Iterator[str]:
        """What is wrong with its metadata."""
        if self.metadata["Requires-Python"] != python:
            yield f"it requires Python {self.metadata['Requires-Python']}, not {python}"
        if self.metadata["License-Expression"] != "Apache-2.0":
            yield f"its licence is {self.metadata['License-Expression']}"
        for line in self.metadata.get_all("Requires-Dist", []):
            requirement = Requirement(line)
            operators = sorted(part.operator for part in requirement.specifier)
            if requirement.url or "==" in operators or "===" in operators:
                yield f"it requires one exact version: {line}"
            elif (
                requirement.name in siblings and requirement.name != self.metadata["Name"] and operators != ["<", ">="]
            ):
                yield f"it requires a sibling without a range: {line}"
            elif not operators and requirement.name != self.metadata["Name"]:
                yield f"it requires any version: {line}"


def tracked(folder: Path, names: tuple[str, ...]) -> Iterator[str]:
    """The files of a package that git knows, by names in its folder."""
    command = ["git", "ls-files", "--cached", "--", "."]
    listed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    return (name for name in listed.splitlines() if name.startswith(names))


def read_wheel(path: Path, folder: Path) -> Distribution:
    """Reads a wheel; its modules are in `src` of the package."""
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        own = frozenset(name for name in names if name.partition("/")[0].endswith(".dist-info"))
        (metadata,) = (name for name in own if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    return Distribution(path, folder, frozenset(f"src/{name}" for name in names - own), own, Parser().parsestr(text))


def read_sdist(path: Path, folder: Path) -> Distribution:
    """Reads an sdist; its files are in a folder with the name of the sdist."""
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2]: member for member in archive.getmembers() if not member.isdir()}
        described = archive.extractfile(names["PKG-INFO"])
        text = described.read().decode() if described else ""
    own = frozenset(name for name in names if name in ADDED_TO_SDIST or ".egg-info/" in name)
    return Distribution(path, folder, frozenset(names) - own, own, Parser().parsestr(text))


def check(dist: Path, root: Path) -> list[str]:
    """What is wrong with the distributions in a folder, package by package."""
    project: dict[str, Any] = tomli.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folders = sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))
    siblings = frozenset(folder.name for folder in folders)
    found = []
    expected = set()
    for folder in folders:
        stem = folder.name.replace("-", "_")
        for pattern, read in ((f"{stem}-*.whl", read_wheel), (f"{stem}-*.tar.gz", read_sdist)):
            paths = sorted(dist.glob(pattern))
            expected.update(paths)
            if len(paths) != 1:
                found.append(f"{folder.name}: {len(paths)} files are called {pattern}, there must be one")
                continue
            problems = read(paths[0], folder).problems(project["requires-python"], siblings)
            found += [f"{paths[0].name}: {problem}" for problem in problems]
    return found + [f"{path.name} is of no package" for path in sorted(set(dist.iterdir()) - expected)]


def main(arguments: list[str]) -> int:
    """Prints what is wrong and returns the exit code."""
    if not arguments or not Path(arguments[0]).is_dir():
        print("distributions: name the folder that holds them (`nox -s build` makes it)", file=sys.stderr)
        return 2
    problems = check(Path(arguments[0]), Path(arguments[1]).resolve() if len(arguments) > 1 else ROOT)
    for line in problems:
        print(f"distributions: {line}", file=sys.stderr)
    if not problems:
        print("distributions: every wheel and every sdist is complete")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
