"""Comparing versions of installed distributions without importing them."""

from __future__ import annotations

import operator
from functools import cache
from typing import Final

from accel_state.errors import SettingError

__all__ = ("OPERATORS", "compare", "installed_version", "is_torch_version")

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


def is_torch_version(operation: str, required: str) -> bool:
    """Whether the installed torch fits, for example `is_torch_version(">=", "2.9")`."""
    return compare(installed_version("torch") or "0", operation, required)
