"""Check that built wheels and sdists contain exactly the files that git has, with the right metadata.

    python tools/check_distributions.py FOLDER [PACKAGE...] [--repository FOLDER]
    python tools/check_distributions.py --normalise FOLDER
    python tools/check_distributions.py --equal FOLDER OTHER

A wheel must have exactly the files below a package's `src`, the stubs that a build writes, `py.typed` and the licence;
an sdist also the tests and the files that it is built from. Both must name the supported Python, authors, addresses
and keywords, require other packages by ranges, and have a description whose links work on the package index.

`--normalise` packs sdists again with the time of `SOURCE_DATE_EPOCH` and without a user's name: setuptools writes
those of the machine into them. `--equal` compares two folders byte by byte.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
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
RELATIVE_LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)\s]+)\)")
URLS = ("Changelog", "Documentation", "Issues", "Source")
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
        for field in ("Author", "Keywords", "Summary"):
            if not self.metadata[field]:
                yield f"its metadata have no {field}"
        urls = {line.partition(",")[0] for line in self.metadata.get_all("Project-URL", [])}
        yield from (f"its metadata have no address for {name}" for name in URLS if name not in urls)
        description = self.metadata.get_payload()
        for link in RELATIVE_LINK.findall(description if isinstance(description, str) else ""):
            yield f"its description has a link that leads nowhere on the package index: {link}"
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


def check(dist: Path, root: Path, packages: Sequence[str]) -> list[str]:
    """What is wrong with the distributions in a folder, package by package."""
    project: dict[str, Any] = tomli.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folders = sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))
    siblings = frozenset(folder.name for folder in folders)
    found = []
    expected = set()
    for folder in folders:
        if packages and folder.name not in packages:
            continue
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


def normalise(sdist: Path, time: int) -> None:
    """Packs an sdist again: files in the order of their names, all of this time, of nobody, with plain modes."""
    packed = io.BytesIO()
    with tarfile.open(sdist) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = time, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with sdist.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=time) as file:
        file.write(packed.getvalue())


def unequal(first: Path, second: Path) -> list[str]:
    """The files that are not byte by byte the same in two folders."""
    names = sorted({path.name for folder in (first, second) for path in folder.iterdir()})
    pairs = [(first / name, second / name) for name in names]
    return [
        f"{one.name} differs between two builds"
        for one, other in pairs
        if not (one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes())
    ]


def main(arguments: list[str]) -> int:
    """Prints what is wrong and returns the exit code."""
    parser = argparse.ArgumentParser(prog="check_distributions.py", description="Check built wheels and sdists.")
    parser.add_argument("folder", type=Path, help="the folder that holds them (`nox -s build` makes it)")
    parser.add_argument("packages", nargs="*", help="the packages that were built; all by default")
    parser.add_argument("--repository", type=Path, default=ROOT, help="the folder that they were built from")
    parser.add_argument("--normalise", action="store_true", help="pack the sdists again")
    parser.add_argument("--equal", type=Path, metavar="OTHER", help="compare with another folder")
    request = parser.parse_args(arguments)
    if not request.folder.is_dir():
        parser.error(f"{request.folder} is not a folder")
    if request.normalise:
        for path in sorted(request.folder.glob("*.tar.gz")):
            normalise(path, int(os.environ.get("SOURCE_DATE_EPOCH", "0")))
        return 0
    if request.equal:
        problems = unequal(request.folder, request.equal)
    else:
        problems = check(request.folder, request.repository.resolve(), request.packages)
    for line in problems:
        print(f"distributions: {line}", file=sys.stderr)
    if not problems:
        print(f"distributions: every file is {'the same' if request.equal else 'complete'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
