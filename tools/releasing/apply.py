"""Writes a release into the files of a package: version, ranges, changelog. Nothing is committed, tagged or pushed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import date
from typing import Any

import tomlkit
from packaging.requirements import Requirement
from packaging.version import Version

from releasing.fragments import UNTOLD, WAIVERS
from releasing.plan import Entry, Planner
from releasing.ranges import Bound, in_order
from releasing.workspace import History, Package, ReleaseError, named, tag_name

VERSION_LINE = re.compile(r'^__version__ = "[^"]*"$', re.MULTILINE)


def prepare(workspace: tuple[Package, ...], history: History, names: Iterable[str]) -> tuple[Entry, ...]:
    """The entries to apply, in the order of the layers.

    Raises:
        ReleaseError: a package is unknown, files are not committed, or the plan has problems.
    """
    chosen = named(workspace, names)
    asked = f"a release of {', '.join(package.name for package in chosen)}"
    uncommitted = history.uncommitted()
    if uncommitted:
        raise ReleaseError(
            asked, f"not committed: {', '.join(uncommitted[:5])}", "commit or put aside these files first"
        )
    everything = Planner(workspace, history, {package.name for package in chosen}).plan()
    entries = tuple(entry for entry in everything if entry.package in chosen)
    obstacles = [*problems_of(entries), *left_behind(everything, entries)]
    if obstacles:
        raise ReleaseError(asked, "\n        ".join(obstacles), "mend these, then ask `release.py plan` again")
    return entries


def problems_of(entries: Iterable[Entry]) -> Iterator[str]:
    """What stands in the way of each package that is to be released."""
    for entry in entries:
        yield from (f"{entry.package.name}: {problem}" for problem in entry.problems)
        if entry.waits:
            yield f"{entry.package.name}: {entry.verdict()}"
        elif entry.version is None:
            yield f"{entry.package.name}: there is nothing to release, no fragment and no range that has to change"


def left_behind(everything: Iterable[Entry], entries: Iterable[Entry]) -> Iterator[str]:
    """Packages whose ranges would exclude what is released here."""
    releases = {entry.package.name: entry.version for entry in entries}
    for entry in everything:
        for line in entry.package.requirements if entry.package.name not in releases else ():
            version = releases.get(line.name)
            if version and not line.specifier.contains(version, prereleases=True):
                yield f"{entry.package.name} requires {line.name}{in_order(line.specifier)}: release it in the same go"


def apply(entry: Entry, today: date) -> None:
    """Writes one release into the files of its package.

    Raises:
        ReleaseError: towncrier failed.
    """
    if entry.version is None:
        raise ReleaseError(f"a release of {entry.package.name}", "it has no new version", "add a change fragment")
    write_project(entry.package, entry.version, entry.bounds)
    write_version(entry.package, entry.version)
    if entry.bounds:
        ranges = "\n".join(f"Needs {bound.sibling}{in_order(bound.specifier)}." for bound in entry.bounds)
        (entry.package.changes / "+ranges.dependency.md").write_text(f"{ranges}\n", encoding="utf-8")
    for fragment in entry.fragments:
        if fragment.kind == UNTOLD:
            fragment.path.unlink()
    write_changelog(entry.package, entry.version, today)
    (entry.package.changes / WAIVERS).unlink(missing_ok=True)


def write_project(package: Package, version: Version, bounds: Iterable[Bound]) -> None:
    """Writes version and ranges into pyproject.toml, and leaves all else as it stands."""
    path = package.folder / "pyproject.toml"
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    project: Any = document["project"]
    project["version"] = str(version)
    ranges = {bound.sibling: in_order(bound.specifier) for bound in bounds}
    for lines in (project.get("dependencies", []), *project.get("optional-dependencies", {}).values()):
        for place, line in enumerate(lines):
            requirement = Requirement(line)
            if requirement.name in ranges:
                extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
                lines[place] = f"{requirement.name}{extras}{ranges[requirement.name]}"
    path.write_text(tomlkit.dumps(document), encoding="utf-8")


def write_version(package: Package, version: Version) -> None:
    """Writes the version into the package's module where it says one."""
    path = package.source / package.module / "__init__.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(VERSION_LINE.sub(f'__version__ = "{version}"', text), encoding="utf-8")


def write_changelog(package: Package, version: Version, today: date) -> None:
    """Lets towncrier collect the fragments into CHANGELOG.md."""
    what = ("--version", str(version), "--date", today.isoformat(), "--yes")
    command = [sys.executable, "-m", "towncrier", "build", "--dir", str(package.folder), *what]
    done = subprocess.run(command, cwd=package.folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()
        raise ReleaseError(
            f"the changelog of {package.name} {version}", said, "see [tool.towncrier] in its pyproject.toml"
        )


def commands(entries: Iterable[Entry]) -> Iterator[str]:
    """What is left to do by hand, once the changes were read."""
    releases = [entry for entry in entries if entry.version]
    title = ", ".join(f"{entry.package.name} {entry.version}" for entry in releases)
    yield "git add --all " + " ".join(f"packages/{entry.package.folder.name}" for entry in releases)
    yield f"git commit -m 'Release {title}'"
    for entry in releases:
        if entry.version:
            yield f"git tag -a {tag_name(entry.package.name, entry.version)} -m '{entry.package.name} {entry.version}'"
