"""Whether a package can be imported, answered without importing it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache

__all__ = ("importable", "look_again")


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
