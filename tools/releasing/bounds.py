"""What a package must require of a sibling: no more than the names that it uses need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import griffe
from packaging.requirements import Requirement
from packaging.specifiers import Specifier, SpecifierSet
from packaging.version import Version

from releasing.usage import Use, has, uses
from releasing.versions import series_end, short
from releasing.workspace import Package


@dataclass(frozen=True)
class Sibling:
    """A package that another requires, as the one that requires it may get it."""

    package: Package
    released: Sequence[Version]
    """Versions that have a tag, oldest first."""
    coming: Version | None
    """The version that is released in the same go, which has everything that the current files have."""
    names: Callable[[Version | None], griffe.Module]
    """Gives the names of a released version, and of the current files for None."""

    def offered(self) -> list[Version]:
        """Every version that there is or will be, oldest first."""
        return [*self.released, *([self.coming] if self.coming else [])]

    def at(self, version: Version) -> griffe.Module:
        """The names of one of the versions that are offered."""
        return self.names(None if version == self.coming else version)


@dataclass(frozen=True)
class Bound:
    """A range that has to change, and why."""

    sibling: str
    specifier: SpecifierSet
    reason: str

    def __str__(self) -> str:
        return f"{self.sibling}{in_order(self.specifier)}: {self.reason}"


class Unreleased(Exception):
    """A name is used that no version of the sibling has, not even the one to come."""


def needed(package: Package, sibling: Sibling) -> Bound | None:
    """The range that a package needs of a sibling where the one it declares is not right.

    Raises:
        Unreleased: no version has all the names that are used.
    """
    declared = declared_range(package, sibling.package)
    offered = sibling.offered()
    inside = [version for version in offered if declared.contains(version, prereleases=True)]
    reasons, specifier = [], declared
    lowest, missing = first_that_fits(package, sibling, inside or offered)
    if missing:
        specifier = replaced(specifier, ">=", short(lowest))
        reasons.append(missing)
    if offered and not declared.contains(offered[-1], prereleases=True):
        specifier = replaced(specifier, "<", short(series_end(offered[-1])))
        reasons.append(f"{offered[-1]} is outside of {in_order(declared)}")
    return Bound(sibling.package.name, specifier, "; ".join(reasons)) if reasons else None


def first_that_fits(package: Package, sibling: Sibling, candidates: Sequence[Version]) -> tuple[Version, str]:
    """The oldest version with all names that are used, and what the one before it lacks (nothing: it is the oldest)."""
    current = sibling.names(None)
    wanted = {use: place for use, place in uses(package, sibling.package).items() if has(current, use)}
    lacks = ""
    later = [version for version in sibling.offered() if not candidates or version >= candidates[0]]
    for version in later:
        missing = sorted(use for use in wanted if not has(sibling.at(version), use))
        if not missing:
            return version, lacks
        lacks = told(missing, wanted, version)
    raise Unreleased(lacks or f"{sibling.package.name} has no version yet")


def told(missing: Sequence[Use], wanted: dict[Use, str], version: Version) -> str:
    """A sentence about names that a version does not have."""
    others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{wanted[missing[0]]} uses {missing[0]}{others}, which {version} does not have"


def declared_range(package: Package, other: Package) -> SpecifierSet:
    """What all lines of a package together say of another."""
    combined = SpecifierSet()
    for line in lines_about(package, other.name):
        combined &= line.specifier
    return combined


def lines_about(package: Package, name: str) -> Iterator[Requirement]:
    """The requirements of a package that name another one."""
    return (line for line in package.requirements if line.name == name)


def replaced(specifier: SpecifierSet, operator: str, version: str) -> SpecifierSet:
    """A range with another lower (`>=`) or upper (`<`) bound."""
    kept = [part for part in specifier if part.operator != operator]
    return SpecifierSet(",".join(map(str, [*kept, Specifier(f"{operator}{version}")])))


def in_order(specifier: SpecifierSet) -> str:
    """A range with its lower bound first, as the pyproject files have it."""
    return ",".join(sorted(map(str, specifier), key=lambda part: not part.startswith(">")))
