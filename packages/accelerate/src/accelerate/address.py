"""Modules at old addresses, which forward their names to the modules that define them.

A name is looked up in its owner when it is first read. Assignments and deletions change the owner and every accel
module with the same object under that name, so `mock.patch("accelerate.utils.gather")` affects all callers.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import ModuleType
from typing import Any, Final

from accel_state.errors import AccelError
from accelerate.names import (
    NAMES,
    NOT_PROVIDED,
    OWN_LOGGERS,
    PACKAGES,
    REMOVED,
    VERSION,
    Owner,
    libraries,
    owners,
    served,
)

__all__ = ("OldModule", "UnknownName", "serve", "why_not")


class UnknownName(AccelError, AttributeError):
    """Raised when a module at an old address does not have an attribute."""


_NO_NAME: Final = "This module has no such name."

# The modules from which a name was deleted, until it is assigned again: `mock.patch` restores it in these two steps.
_deleted: Final[dict[Owner, list[ModuleType]]] = {}


class OldModule(ModuleType):
    """A module at an old address."""

    def __getattr__(self, name: str) -> Any:
        owner = served(self.__name__).get(name)
        if owner is not None:
            value = vars(self)[name] = _read(owner, self.__name__)
            return value
        if name == "__all__":
            return tuple(sorted(owners(self.__name__)))
        inside = f"{self.__name__}.{name}"
        if inside in NAMES:
            return importlib.import_module(inside)
        if name == "logger" and self.__name__ in OWN_LOGGERS:
            from accel_state.logging import get_logger

            return get_logger(self.__name__)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        library = libraries().get(name) if self.__name__ not in PACKAGES else None
        if library is not None:
            return importlib.import_module(library)
        advice = _advice(self.__name__, name) or (_NO_NAME, f"dir({self.__name__}) lists what there is.")
        raise UnknownName(_asked(self.__name__, name), *advice)

    def __setattr__(self, name: str, value: Any) -> None:
        owner = served(self.__name__).get(name)
        if owner is None:
            super().__setattr__(name, value)
            if not name.startswith("__"):
                _replaced(self.__name__, name, None, value)
        elif not (isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"):
            # The import system also sets submodules as attributes; such an assignment must not replace a name.
            for holder in _deleted.pop(owner, None) or _holders(owner):
                setattr(holder, owner.name, value)
            _forget(owner)
            _replaced(self.__name__, name, owner.module, value)

    def __delattr__(self, name: str) -> None:
        owner = served(self.__name__).get(name)
        if owner is None:
            super().__delattr__(name)
            return
        _deleted[owner] = _holders(owner)
        for holder in _deleted[owner]:
            delattr(holder, owner.name)
        _forget(owner)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *served(self.__name__)})


def serve(address: str) -> None:
    """Make a module at an old address serve the names of the table."""
    sys.modules[address].__class__ = OldModule


def why_not(address: str) -> tuple[str, str, str] | None:
    """Why a module cannot be imported, in three parts; None if the only reason is that it does not exist.

    Args:
        address: address of the module, or of a name in a package from which it was imported.
    """
    package, _, name = address.rpartition(".")
    if name in served(package):
        try:
            getattr(sys.modules[package], name)
        except UnknownName as error:
            return error.failure, error.obstacle, error.remedy
        return None
    advice = None if name.startswith("__") else _advice(package, name)
    return advice and (_asked(package, name), *advice)


@cache
def _join() -> None:
    """Set up logging, reports and warnings, once, when the first name is read; before, no package logs for a script."""
    from accel_state.library import add_library
    from accelerate.loggers import join_loggers
    from accelerate.unread import watch

    # Reports that name the caller of a collective skip the lines of this package.
    add_library("accelerate")
    join_loggers()
    watch()


def _read(owner: Owner, address: str) -> Any:
    from accelerate.unread import add_descriptors

    _join()
    try:
        module = importlib.import_module(owner.module)
    except ModuleNotFoundError as error:
        from accelerate.separate import SEPARATE, MissingName

        if error.name not in SEPARATE:
            raise
        return MissingName(owner.name, error.name)
    add_descriptors()
    try:
        return getattr(module, owner.name)
    except AttributeError:
        from accel_state.settings.installed import installed_version

        distribution = owner.module.partition(".")[0].replace("_", "-")
        raise UnknownName(
            f"Cannot read {owner.name!r} from {address}, which has it from {owner.module}.",
            f"{distribution} {installed_version(distribution)} does not have it, so its version does not fit "
            f"accelerate {VERSION}.",
            f"Install accelerate and {distribution} from wheels of one build of the accel repository.",
        ) from None


def _holders(owner: Owner) -> list[ModuleType]:
    """The owner, and every other module of this project that imported the object under the same name."""
    home = importlib.import_module(owner.module)
    value = vars(home).get(owner.name, _deleted)
    ours = [module for name, module in list(sys.modules.items()) if _is_ours(name)]
    return [home, *(module for module in ours if module is not home and vars(module).get(owner.name) is value)]


def _is_ours(module: str) -> bool:
    from accel_state.library import OWN_PACKAGES

    return module.partition(".")[0] in OWN_PACKAGES or module.startswith("accelerate.legacy.")


def _replaced(address: str, name: str, owner: str | None, value: Any) -> None:
    from accelerate.unread import ACTING, warn_of_global

    if owner is not None and name in ACTING:
        module, _, function = ACTING[name].partition(":")
        getattr(importlib.import_module(module), function)(value)
    elif owner is None or getattr(value, "__module__", None) != owner:
        warn_of_global(address, name, owner)


def _forget(owner: Owner) -> None:
    """Make every old module look the name up again."""
    for module in list(sys.modules.values()):
        if isinstance(module, OldModule):
            names = served(module.__name__)
            for name in [name for name in vars(module) if names.get(name) == owner]:
                del vars(module)[name]


def _asked(address: str, name: str) -> str:
    return f"Cannot import {name!r} from {address!r}."


def _advice(address: str, name: str) -> tuple[str, str] | None:
    """Cause and remedy for a name that an old module does not have, if they are known."""
    from accel_state.settings.schema import closest
    from accelerate.installation import clash

    if f"{address}.{name}" in NOT_PROVIDED:
        return clash() or NOT_PROVIDED[f"{address}.{name}"]
    if name in REMOVED:
        return f"It was removed before {VERSION.partition('+')[0]}.", REMOVED[name]
    homes = [address for address in NAMES if name in owners(address)]
    near = closest(name, served(address))
    remedy = f"Import it from {homes[0]}." if homes else f"Did you mean {near}?" if near else ""
    return (_NO_NAME, remedy) if remedy else clash()
