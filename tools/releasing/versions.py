"""How far a version moves for a change, and where the series that it belongs to ends."""

from __future__ import annotations

from enum import IntEnum

from packaging.version import Version


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
