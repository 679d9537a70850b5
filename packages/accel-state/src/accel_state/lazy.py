"""Lazy packages: a package imports the module of a public name when the name is first used.

    __getattr__, __dir__, __all__ = lazy_stub(__name__, __file__)

with an `__init__.pyi` beside it that lists the names, also for type checkers. A package without a stub gives a table:

    __all__ = ("gather", "reduce")
    __getattr__, __dir__ = lazy_names(__name__, {"accel_ops.collectives": ("gather", "reduce")})

Then type checkers read the same list from an `if TYPE_CHECKING:` block; a test of each package keeps the two equal.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

__all__ = ("lazy_names", "lazy_stub")

_STUB_LINE: Final = re.compile(r"^from (\S+) import (?:(\w+) as \2|\*)(?: +#.*)?$", re.MULTILINE)


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


def lazy_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], tuple[str, ...]]:
    """The module-level `__getattr__`, `__dir__` and `__all__` of a package whose `__init__.pyi` lists its public names.

    Each line of the stub has the form `from module import name as name`, or `from package import *` for all public
    names of another package. Type checkers and editors read the same file, so each name is written once.

    Args:
        file: the `__file__` of the package.

    Example:
        __getattr__, __dir__, __all__ = lazy_stub(__name__, __file__)
    """
    with open(f"{file.removesuffix('.py')}.pyi", encoding="utf-8") as stub:
        lines = _STUB_LINE.findall(stub.read())
    names_by_module: dict[str, list[str]] = {}
    for module, name in lines:
        names = [name] if name else importlib.import_module(module).__all__
        names_by_module.setdefault(module, []).extend(names)
    look_up, list_names = lazy_names(package, names_by_module)
    return look_up, list_names, tuple(name for names in names_by_module.values() for name in names)
