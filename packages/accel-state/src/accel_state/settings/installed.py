"""Which packages are installed, found without importing them, and the error when a required one is missing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from typing import NamedTuple

from accel_state.errors import Missing

__all__ = ("Requirement", "importable", "installed_version", "look_again")


@cache
def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def importable(module: str) -> bool:
    """Whether `import module` would find something; a folder without an `__init__` counts as found.

    Example:
        >>> importable("json"), importable("no_such_package")
        (True, False)
    """
    if module in sys.modules:
        return sys.modules[module] is not None
    return _found(module)


def look_again() -> None:
    """Forget what was found, because the program itself installed something."""
    importlib.invalidate_caches()
    _found.cache_clear()


@cache
def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution by its name on the package index, or None when it is absent."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


class Requirement(NamedTuple):
    """A package that a backend, a tracker or a feature needs.

    Args:
        module: the name it is imported by, such as "torch_xla".
        distribution: its name on the package index; the module's name by default.
        versions: allowed versions as a specifier such as ">=0.15"; empty for any.
        extra: what to install to get it, such as "accel-plugins[xla]"; the distribution by default.
    """

    module: str
    distribution: str = ""
    versions: str = ""
    extra: str = ""

    def obstacle(self) -> str | None:
        """What stands in the way, in one sentence, or None when the requirement is met."""
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
        """The install line."""
        return f'Run: pip install "{self.extra or (self.distribution or self.module) + self.versions}"'

    def demand(self, asked: str) -> None:
        """Raise unless the requirement is met; `asked` says for what it is needed.

        Raises:
            Missing: the package is absent or of another version.
        """
        obstacle = self.obstacle()
        if obstacle is not None:
            raise Missing(asked, obstacle, self.remedy())
