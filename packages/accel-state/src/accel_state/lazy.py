"""Lazy packages: a package imports the module of a public name when the name is first used.

    __getattr__, __dir__, __all__ = lazy_stub(__name__, __file__)

with an `__init__.pyi` beside it that lists the names, for type checkers and editors as well.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any, Final

__all__ = ("lazy_stub",)

_STUB_LINE: Final = re.compile(r"^from (\S+) import (?:(\w+) as \2|\*)(?: +#.*)?$", re.MULTILINE)


def lazy_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], tuple[str, ...]]:
    """The module-level `__getattr__`, `__dir__` and `__all__` of a package whose `__init__.pyi` lists its public names.

    Each line of the stub has the form `from module import name as name`, or `from package import *` for all public
    names of another package. So each name is written once.

    Args:
        file: the `__file__` of the package.

    Example:
        __getattr__, __dir__, __all__ = lazy_stub(__name__, __file__)
    """
    with open(f"{file.removesuffix('.py')}.pyi", encoding="utf-8") as stub:
        lines = _STUB_LINE.findall(stub.read())
    listed = [
        (each, module)
        for module, name in lines
        for each in ((name,) if name else importlib.import_module(module).__all__)
    ]
    owner = dict(listed)

    def look_up(name: str) -> Any:
        if name not in owner:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(owner[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *owner})

    return look_up, list_names, tuple(name for name, _ in listed)
