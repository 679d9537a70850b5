"""The packages of the repository from the lowest layer upward: their versions, requirements and earlier releases."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import IntEnum
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import tomli
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version


class ReleaseError(Exception):
    """The request, the obstacle and the remedy."""

    def __init__(self, asked: str, obstacle: str, remedy: str) -> None:
        super().__init__(f"asked:  {asked}\nfailed: {obstacle}\nremedy: {remedy}")


@dataclass(frozen=True)
class Package:
    """What the pyproject.toml of one package says of it."""

    name: str
    folder: Path
    version: Version
    requirements: tuple[Requirement, ...]
    """Every line of `dependencies` and of the extras, except those that name the package itself."""

    @property
    def module(self) -> str:
        """The name that it is imported by."""
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        """The folder that is searched for its module."""
        return self.folder / "src"

    @property
    def changes(self) -> Path:
        """The folder of its change fragments and waivers."""
        return self.folder / "changes"


def read_package(folder: Path) -> Package:
    """Reads one package's pyproject.toml."""
    project: dict[str, Any] = tomli.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists: Iterable[list[str]] = (project.get("dependencies", []), *project.get("optional-dependencies", {}).values())
    lines = (Requirement(line) for group in lists for line in group)
    others = tuple(line for line in lines if line.name != project["name"])
    return Package(project["name"], folder, Version(project["version"]), others)


def read_workspace(root: Path) -> tuple[Package, ...]:
    """All packages below `root/packages`, each after those that it requires.

    Raises:
        ReleaseError: there is none, or two require each other.
    """
    found = {package.name: package for package in map(read_package, sorted(package_folders(root)))}
    if not found:
        raise ReleaseError(f"the packages of {root}", "there is no packages/*/pyproject.toml", "name the right folder")
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, package in found.items():
        sorter.add(name, *sorted({line.name for line in package.requirements} & set(found)))
    try:
        sorter.prepare()
    except CycleError as error:
        raise ReleaseError(
            "the order of the layers",
            f"packages require each other: {' -> '.join(error.args[1])}",
            "take one edge away",
        ) from error
    return tuple(found[name] for name in in_layers(sorter))


def in_layers(sorter: TopologicalSorter[str]) -> Iterable[str]:
    """The names layer by layer, each layer sorted."""
    while sorter.is_active():
        layer = sorted(sorter.get_ready())
        yield from layer
        sorter.done(*layer)


def package_folders(root: Path) -> Iterable[Path]:
    """The folders that hold a package."""
    return (path.parent for path in root.glob("packages/*/pyproject.toml"))


def named(workspace: Iterable[Package], names: Iterable[str]) -> tuple[Package, ...]:
    """The packages of these names, in the order of the layers.

    Raises:
        ReleaseError: a name is not that of a package.
    """
    known = {package.name: package for package in workspace}
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ReleaseError(
                f"the package {name!r}",
                "there is no such package here",
                f"did you mean {near[0]}?" if near else f"use one of: {', '.join(known)}",
            )
    wanted = set(names)
    return tuple(package for package in workspace if package.name in wanted)


# ---------------------------------------------------------------- versions
class Step(IntEnum):
    """How much a change means to whoever uses a package; the greatest of a release decides."""

    FIX = 1
    FEATURE = 2
    BREAKING = 3


def next_version(version: Version, step: Step) -> Version:
    """The version after `version` for a change of this size.

    Semantic versioning; below 1.0 the second number tells of breaking changes and the third of all others, which is how
    `>=0.1,<0.2` reads it. A version with a local part is that of the surface which a package imitates,
    `1.15.0+accel.1`, and only the last number of the local part is ours to count.
    """
    if version.local:
        head, _, last = version.local.rpartition(".")
        return Version(f"{version.public}+{head}.{int(last) + 1}")
    if step is Step.BREAKING:
        return series_end(version)
    major, minor, patch = version.release[:3]
    if step is Step.FEATURE and major:
        return Version(f"{major}.{minor + 1}.0")
    return Version(f"{major}.{minor}.{patch + 1}")


def series_end(version: Version) -> Version:
    """The first version that may break what works with `version`."""
    if version.major:
        return Version(f"{version.major + 1}.0.0")
    return Version(f"0.{version.minor + 1}.0")


def short(version: Version) -> str:
    """A version as a bound has it, without zeros at its end: `0.2` for 0.2.0."""
    numbers = list(version.release)
    while len(numbers) > 2 and numbers[-1] == 0:
        numbers.pop()
    return ".".join(map(str, numbers))


# ---------------------------------------------------------------- releases
def tag_name(package: str, version: Version) -> str:
    """The tag of a release: `accel-ops-v1.3.0`."""
    return f"{package}-v{version}"


@dataclass(frozen=True)
class History:
    """The git repository of a workspace: its tags, and what has changed since."""

    root: Path

    def git(self, *arguments: str) -> bytes:
        """What a git command prints.

        Raises:
            ReleaseError: git failed, with what it said.
        """
        done = subprocess.run(["git", *arguments], cwd=self.root, capture_output=True, check=False)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()
            raise ReleaseError(f"git {' '.join(arguments)}", said, f"see that {self.root} is a complete git checkout")
        return done.stdout

    def lines(self, *arguments: str) -> list[str]:
        """What a git command prints, line by line."""
        return self.git(*arguments).decode().splitlines()

    def versions(self, package: Package) -> list[Version]:
        """The released versions of a package that lead to the current commit, oldest first.

        Raises:
            ReleaseError: a tag of the package names no version.
        """
        prefix = f"{package.name}-v"
        tags = self.lines("tag", "--merged", "HEAD", "--list", f"{prefix}*")
        try:
            return sorted(Version(tag.removeprefix(prefix)) for tag in tags)
        except InvalidVersion as error:
            raise ReleaseError(
                f"the releases of {package.name}", f"a tag names no version: {error}", "delete or rename the tag"
            ) from error

    def changed_files(self, package: Package, version: Version) -> list[str]:
        """The files of a package that users get and that differ from a released version, committed or not."""
        paths = [str((package.folder / name).relative_to(self.root)) for name in ("src", "pyproject.toml")]
        return self.lines("diff", "--name-only", tag_name(package.name, version), "--", *paths)

    def uncommitted(self) -> list[str]:
        """What git would say is not committed, untracked files too."""
        return self.lines("status", "--porcelain")
