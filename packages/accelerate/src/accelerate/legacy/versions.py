"""Compare versions of installed distributions without importing them. Never loads torch."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final

from accel_state.errors import Missing, SettingError
from accel_state.settings.installed import installed_version

if TYPE_CHECKING:
    from packaging.version import Version

    torch_version: Version

_OPERATORS: Final = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def _compare(version: str, operation: str, required: str) -> bool:
    """Whether `version <operation> required` is true; local labels such as `+cpu` are ignored.

    Raises:
        SettingError: there is no such operator.
    """
    from packaging.version import Version

    if operation not in _OPERATORS:
        raise SettingError(
            f"Cannot compare versions with {operation!r}.",
            "It is not an operator of versions.",
            f"Use one of {', '.join(_OPERATORS)}.",
        )
    return bool(_OPERATORS[operation](Version(Version(version).public), Version(required)))


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare a version, or that of an installed library: `compare_versions("torch", ">=", "2")`.

    Raises:
        SettingError: there is no such operator.
        Missing: the library is not installed.
    """
    if not isinstance(library_or_version, str):
        return _compare(str(library_or_version), operation, requirement_version)
    installed = installed_version(library_or_version)
    if installed is None:
        raise Missing(
            f"Cannot compare the version of {library_or_version}.",
            "It is not installed.",
            f"Run: pip install {library_or_version}",
        )
    return _compare(installed, operation, requirement_version)


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of the installed torch, for example `is_torch_version(">=", "2.9")`."""
    return _compare(installed_version("torch") or "0", operation, version)


def __getattr__(name: str) -> Any:
    if name != "torch_version":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from packaging.version import Version

    version = globals()[name] = Version(installed_version("torch") or "0")
    return version
