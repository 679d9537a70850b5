"""Comparing versions of installed distributions without importing them."""

from __future__ import annotations

import operator
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from accel_state.errors import Missing, SettingError

if TYPE_CHECKING:
    from packaging.version import Version

    torch_version: Version

__all__ = ("OPERATORS", "compare", "compare_versions", "installed_version", "is_torch_version", "torch_version")

OPERATORS: Final = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


@cache
def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution by its name on the package index, or None when it is absent."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def compare(version: str, operation: str, required: str) -> bool:
    """Whether `version <operation> required` holds; local labels such as `+cpu` do not count.

    Raises:
        SettingError: the operation is none of `OPERATORS`.
    """
    from packaging.version import Version

    if operation not in OPERATORS:
        raise SettingError(
            f"A comparison with {operation!r} was asked for.",
            f"Only {', '.join(OPERATORS)} are known.",
            "Use one of them.",
        )
    return bool(OPERATORS[operation](Version(Version(version).public), Version(required)))


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Whether an installed library, by its name, or a version fits, for example `compare_versions("torch", ">=", "2")`.

    Raises:
        SettingError: the operation is none of `OPERATORS`.
        Missing: the library is not installed.
    """
    if not isinstance(library_or_version, str):
        return compare(str(library_or_version), operation, requirement_version)
    installed = installed_version(library_or_version)
    if installed is None:
        raise Missing(
            f"The version of {library_or_version} was to be compared.",
            "It is not installed.",
            f"Run: pip install {library_or_version}",
        )
    return compare(installed, operation, requirement_version)


def is_torch_version(operation: str, version: str) -> bool:
    """Whether the installed torch fits, for example `is_torch_version(">=", "2.9")`."""
    return compare(installed_version("torch") or "0", operation, version)


def __getattr__(name: str) -> Any:
    if name != "torch_version":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from packaging.version import Version

    found = globals()[name] = Version(installed_version("torch") or "0")
    return found
