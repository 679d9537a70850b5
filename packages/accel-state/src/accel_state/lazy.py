"""Lazy packages: a package's `__init__` lists its public names and imports their modules when a name is first used.

    __all__ = ("gather", "reduce")
    __getattr__, __dir__ = lazy_names(__name__, {"accel_ops.collectives": ("gather", "reduce")})

Type checkers read the same list from an `if TYPE_CHECKING:` block; a test of each package keeps the two equal.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ("lazy_names",)


def lazy_names(
    package: str, names_by_module: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The module-level `__getattr__` and `__dir__` of a package whose names live in the given modules."""
    owner = {name: module for module, names in names_by_module.items() for name in names}

    def look_up(name: str) -> Any:
        if name not in owner:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(owner[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *owner})

    return look_up, list_names
