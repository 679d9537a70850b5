"""Which packages are installed, found without importing them, and the error when a required one is missing."""

from __future__ import annotations

import importlib
import os
import sys
from functools import cache
from typing import NamedTuple

from accel_state.errors import Missing

__all__ = ("Requirement", "folder_names", "importable", "installed_version", "look_again")


@cache
def _is_installed(module: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def importable(module: str) -> bool:
    """Whether `import module` would find a module; a folder without an `__init__` counts.

    Example:
        >>> importable("json"), importable("no_such_package")
        (True, False)
    """
    if module in sys.modules:
        return sys.modules[module] is not None
    return _is_installed(module)


def folder_names(folder: str) -> frozenset[str]:
    """Names of the files in a folder of `sys.path`; empty if there is no such folder, or if it is an archive."""
    try:
        return frozenset(os.listdir(folder or os.curdir))
    except OSError:
        return frozenset()


def look_again() -> None:
    """Search again at the next call, because the running process has installed a package."""
    importlib.invalidate_caches()
    _is_installed.cache_clear()


@cache
def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution by its name on the package index; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


class Requirement(NamedTuple):
    """A package that a backend, tracker or feature requires.

    Args:
        module: its import name, such as "torch_xla".
        distribution: its name on the package index; the module's name by default.
        versions: allowed versions as a specifier such as ">=0.15"; empty for any.
        install: argument of `pip install`, such as "transformer-engine[pytorch]"; the distribution by default.
    """

    module: str
    distribution: str = ""
    versions: str = ""
    install: str = ""

    def obstacle(self) -> str | None:
        """Why the requirement is not met, in one sentence; None when it is."""
        name = self.distribution or self.module
        if not importable(self.module):
            return f"The package {name!r} is not installed."
        if not self.versions:
            return None
        from packaging.specifiers import SpecifierSet

        installed = installed_version(name)
        if installed is None or SpecifierSet(self.versions).contains(installed, prereleases=True):
            return None
        return f"{name} {installed} is installed; {self.versions} is needed."

    def remedy(self) -> str:
        """The install command."""
        return f'Run: pip install "{self.install or (self.distribution or self.module) + self.versions}"'

    def error(self, failure: str) -> Missing | None:
        """The error of a feature that needs the package, or None when the requirement is met.

        Args:
            failure: what fails without the package, as the first part of the error.
        """
        obstacle = self.obstacle()
        return None if obstacle is None else Missing(failure, obstacle, self.remedy())

    def demand(self, failure: str) -> None:
        """Raise an error unless the requirement is met.

        Args:
            failure: what fails without the package, as the first part of the error.

        Raises:
            Missing: the package is not installed, or its version does not fit.
        """
        error = self.error(failure)
        if error is not None:
            raise error
