"""Print the lowest versions that a package allows, as constraints to install it under.

    python tools/lowest_versions.py PACKAGE [EXTRA...]

A lower bound that no test installs is a guess. The packages that this one requires from this repository are not listed,
but their own lower bounds count too: the highest of all bounds for a name is the lowest version that can be installed.
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
    """The [project] table of each package."""
    tables = (tomli.loads(path.read_text(encoding="utf-8"))["project"] for path in packages.glob("*/pyproject.toml"))
    return {table["name"]: table for table in tables}


def requirements(known: dict[str, dict[str, Any]], name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    """What a package requires from others, with all that its siblings require."""
    waiting = [(name, "")] + [(name, extra) for extra in extras]
    seen: set[tuple[str, str]] = set()
    while waiting:
        place = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        project = known[place[0]]
        lines = project["optional-dependencies"][place[1]] if place[1] else project.get("dependencies", [])
        for requirement in map(Requirement, lines):
            if requirement.name in known:
                waiting += [(requirement.name, extra) for extra in ("", *sorted(requirement.extras))]
            else:
                yield requirement


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
    name, *extras = arguments or [""]
    missing = [extra for extra in extras if extra not in known.get(name, {}).get("optional-dependencies", {})]
    if name not in known or missing:
        print(f"lowest versions: there is no package {name!r} with {missing or 'that name'}", file=sys.stderr)
        return 2
    try:
        bounds = lowest(requirements(known, name, extras))
    except ValueError as error:
        print(f"lowest versions: {error}", file=sys.stderr)
        return 1
    for dependency, version in sorted(bounds.items()):
        print(f"{dependency}=={version}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
