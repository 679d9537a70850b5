"""What would be released and why, walking the layers upward."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import griffe
from packaging.version import Version

from releasing import api
from releasing.fragments import Fragment, fragment_problems, read_fragments
from releasing.ranges import Bound, Sibling, Unreleased, needed
from releasing.workspace import History, Package, Step, next_version, tag_name


@dataclass(frozen=True)
class Entry:
    """What a plan says of one package."""

    package: Package
    before: Version | None
    """The last version that has a tag."""
    version: Version | None
    """The version to release, or None where there is nothing to tell."""
    fragments: tuple[Fragment, ...] = ()
    bounds: tuple[Bound, ...] = ()
    comparison: api.Comparison | None = None
    problems: tuple[str, ...] = ()
    waits: bool = False
    """Whether the version stands in the files already and only its tag is missing."""

    def lines(self) -> Iterator[str]:
        """The entry as text."""
        yield f"{self.package.name:<16}{self.verdict()}"
        for fragment in self.fragments:
            yield f"    {fragment.kind}: {fragment.headline}"
        for bound in self.bounds:
            yield f"    {bound}"
        for found, waiver in self.comparison.accepted if self.comparison else ():
            yield f"    waived: {found}: {waiver.reason}"
        for problem in self.problems:
            yield f"    problem: {problem}"

    def verdict(self) -> str:
        """The version that comes, in a few words."""
        if self.waits:
            return f"{self.version} waits for its tag {tag_name(self.package.name, self.package.version)}"
        if self.version is None:
            return f"{self.before or self.package.version} stays"
        return f"{self.before} -> {self.version}" if self.before else f"{self.version}, the first release"


@dataclass
class Planner:
    """Walks the layers upward; what lower packages come to decides on what upper ones require."""

    workspace: tuple[Package, ...]
    history: History
    chosen: Collection[str]
    """The packages that are released in one go."""
    entries: dict[str, Entry] = field(default_factory=dict)
    _names: dict[tuple[str, Version | None], griffe.Module] = field(default_factory=dict)

    def plan(self) -> tuple[Entry, ...]:
        """One entry for each package, from the lowest layer upward."""
        for package in self.workspace:
            self.entries[package.name] = self.entry(package)
        return tuple(self.entries.values())

    def entry(self, package: Package) -> Entry:
        """What is to be said of a package whose lower layers are known."""
        versions = self.history.versions(package)
        before = versions[-1] if versions else None
        fragments = read_fragments(package)
        problems = list(fragment_problems(package))
        comparison = self.comparison(package, before)
        problems += comparison.problems() if comparison else ()
        problems += self.unexplained(package, before, fragments)
        bounds, obstacles = self.bounds(package)
        problems += obstacles
        if before != package.version and not fragments:
            return Entry(package, before, package.version, bounds=bounds, problems=tuple(problems), waits=True)
        version = coming(package, before, fragments, bounds, comparison) if package.name in self.chosen else None
        return Entry(package, before, version, fragments, bounds, comparison, tuple(problems))

    def unexplained(self, package: Package, before: Version | None, fragments: tuple[Fragment, ...]) -> Iterator[str]:
        """Versions and files that changed in a way that no release has made."""
        if before is None:
            return
        if before > package.version:
            yield f"its version is {package.version}, but {tag_name(package.name, before)} exists already"
        elif before < package.version and fragments:
            yield f"{package.version} has no tag yet, and fragments were added since: tag it first"
        changed = self.history.changed_files(package, before)
        if before == package.version and changed and not fragments:
            yield f"{len(changed)} files changed since {before} and no fragment says what for: {', '.join(changed[:3])}"

    def comparison(self, package: Package, before: Version | None) -> api.Comparison | None:
        """The package against its last tag, where it has one."""
        if before is None:
            return None
        waivers = api.read_waivers(package)
        if not self.history.changed_files(package, before):
            return api.Comparison((), (), waivers)
        return api.compare(self.names(package, before), self.names(package, None), waivers)

    def bounds(self, package: Package) -> tuple[tuple[Bound, ...], list[str]]:
        """The ranges that have to change, and what stands in the way of finding them."""
        found, problems = [], []
        for name in sorted({line.name for line in package.requirements} & set(self.entries)):
            try:
                bound = needed(package, self.sibling(name))
            except Unreleased as error:
                problems.append(f"no release of {name} is enough: {error}; release {name} in the same go")
            else:
                found += [bound] if bound else []
        return tuple(found), problems

    def sibling(self, name: str) -> Sibling:
        """A lower package, as it is offered after this plan."""
        entry = self.entries[name]
        released = self.history.versions(entry.package)
        return Sibling(entry.package, released, entry.version, lambda version: self.names(entry.package, version))

    def names(self, package: Package, version: Version | None) -> griffe.Module:
        """The names of a released version, or those of the current files."""
        if (package.name, version) not in self._names:
            self._names[package.name, version] = api.load(package, self.workspace, self.history, version)
        return self._names[package.name, version]


def coming(
    package: Package,
    before: Version | None,
    fragments: Iterable[Fragment],
    bounds: Iterable[Bound],
    comparison: api.Comparison | None,
) -> Version | None:
    """The version that tells of all this, or None where there is nothing to tell."""
    steps = [fragment.step for fragment in fragments] + [Step.FIX for _ in bounds]
    if comparison and comparison.breaks:
        steps.append(Step.BREAKING)
    if not steps:
        return None
    return next_version(before, max(steps)) if before else package.version
