"""The packages of the repository: their versions, and which requires which, from the lowest layer upward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import tomli
from packaging.requirements import Requirement
from packaging.version import Version

from releasing.errors import ReleaseError


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
