"""Print the lowest versions that a package allows, as constraints to install it under.

    python tools/lowest_versions.py PACKAGE

A lower bound that no test installs is a guess. The requirements of the package's tests (its dependency group `test`)
count too. Packages of this repository are not listed, but their own lower bounds count: the highest of all bounds for a
name is the lowest version that can be installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]


def projects(packages: Path) -> dict[str, dict[str, Any]]:
    """The [project] table of each package, with the dependency group `test` as its entry "tests"."""
    files = (tomli.loads(path.read_text(encoding="utf-8")) for path in packages.glob("*/pyproject.toml"))
    return {
        file["project"]["name"]: {**file["project"], "tests": file.get("dependency-groups", {}).get("test", [])}
        for file in files
    }


def requirements(known: dict[str, dict[str, Any]], name: str, extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """What a package, some of its extras and its tests require from others, with all that its siblings require."""
    waiting = [Requirement(line) for line in (name, *(f"{name}[{extra}]" for extra in extras), *known[name]["tests"])]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        if requirement.name not in known:
            yield requirement
            continue
        project = known[requirement.name]
        for extra in ("", *requirement.extras):
            if (requirement.name, extra) in seen:
                continue
            seen.add((requirement.name, extra))
            lines = project["optional-dependencies"][extra] if extra else project.get("dependencies", [])
            waiting += map(Requirement, lines)


def lowest(found: Iterable[Requirement]) -> dict[str, Version]:
    """For each name the highest of its lower bounds.

    Raises:
        ValueError: a requirement has no lower bound.
    """
    bounds: dict[str, Version] = {}
    for requirement in found:
        lower = [Version(part.version) for part in requirement.specifier if part.operator == ">="]
        if not lower:
            raise ValueError(f"{requirement} has no lower bound")
        name = canonicalize_name(requirement.name)
        bounds[name] = max([*lower, bounds.get(name, lower[0])])
    return bounds


def main(arguments: list[str], packages: Path = ROOT / "packages") -> int:
    """Prints the constraints and returns the exit code."""
    known = projects(packages)
    if len(arguments) != 1 or arguments[0] not in known:
        print(f"lowest versions: name one package: {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    try:
        bounds = lowest(requirements(known, arguments[0]))
    except ValueError as error:
        print(f"lowest versions: {error}", file=sys.stderr)
        return 1
    for dependency, version in sorted(bounds.items()):
        print(f"{dependency}=={version}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
