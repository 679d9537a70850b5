"""Lazy packages: a package imports the module of a public name when the name is first used.

    __getattr__, __dir__ = lazy_stub(__name__, __file__)

The `__init__.pyi` beside it lists the names, also for type checkers and editors. It is read when a name, such as
`__all__`, is first looked up.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

__all__ = ("lazy_stub",)


def lazy_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The module-level `__getattr__` and `__dir__` of a package whose `__init__.pyi` lists its public names.

    Each line of the stub has the form `from module import name as name`, or `from package import *` for all public
    names of another package. Each name is written only once.

    Args:
        file: the `__file__` of the package.

    Example:
        __getattr__, __dir__ = lazy_stub(__name__, __file__)
    """

    @cache
    def lines() -> list[tuple[str, str]]:
        """(module, name) of each line of the stub; the name is empty for all names of a package."""
        with open(f"{file.removesuffix('.py')}.pyi", encoding="utf-8") as stub:
            statements = [line.split() for line in stub if line.startswith("from ")]
        return [(words[1], words[3].strip("*")) for words in statements]

    @cache
    def listed() -> list[tuple[str, str]]:
        """(name, module) of each public name."""
        return [
            (each, module)
            for module, name in lines()
            for each in ((name,) if name else importlib.import_module(module).__all__)
        ]

    def look_up(name: str) -> Any:
        if name == "__all__":
            return tuple(each for each, _ in listed())
        # Packages listed with `*` are imported only if no other line has the name.
        module = next((module for module, each in lines() if each == name), None) or dict(listed()).get(name)
        if module is None or name.startswith("__"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(_imported(module, f"{package}.{name}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *(each for each, _ in listed())})

    return look_up, list_names


def _imported(module: str, used: str) -> ModuleType:
    """Import a module.

    Raises:
        Missing: it needs torch, which is not installed; only what works on tensors needs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from accel_state.errors import Missing

        failure, remedy = f"Cannot use {used}.", "Install torch, or accel-state[torch]."
        raise Missing(failure, "It needs torch, which is not installed.", remedy) from None
