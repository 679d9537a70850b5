"""Modules at old addresses, which forward their names to the modules that define them.

A name is looked up in its owner when it is first read. An assignment changes the owner and every accel module with the
same object under that name, so `mock.patch("accelerate.utils.gather")` affects all callers; a deletion undoes it.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import ModuleType
from typing import Any, Final

from accel_state.errors import AccelError
from accelerate.names import (
    LIBRARIES,
    NAMES,
    NOT_PROVIDED,
    PACKAGES,
    REMOVED,
    VERSION,
    Owner,
    owner_of,
    owners,
)

__all__ = ("OldModule", "UnknownName", "serve", "why_not")


class UnknownName(AccelError, AttributeError):
    """Raised when a module at an old address does not have an attribute."""


_NO_NAME: Final = "This module has no such name."

_originals: Final[dict[Owner, Any]] = {}
"""The objects that assignments have replaced; deleting the name puts them back, as `mock.patch` does at its end."""


class OldModule(ModuleType):
    """A module at an old address."""

    def __getattr__(self, name: str) -> Any:
        owner = owner_of(self.__name__, name)
        if owner is not None:
            value = vars(self)[name] = _read(owner, self.__name__)
            return value
        if name == "__all__":
            return tuple(sorted(owners(self.__name__)))
        inside = f"{self.__name__}.{name}"
        if inside in NAMES:
            return importlib.import_module(inside)
        if name == "logger" and self.__name__ not in PACKAGES:
            from accel_state.logging import get_logger

            return get_logger(self.__name__)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if name in LIBRARIES and self.__name__ not in PACKAGES:
            return importlib.import_module(LIBRARIES[name])
        advice = _advice(self.__name__, name) or (_NO_NAME, f"dir({self.__name__}) lists what there is.")
        raise UnknownName(_failed_access(self.__name__, name), *advice)

    def __setattr__(self, name: str, value: Any) -> None:
        owner = owner_of(self.__name__, name)
        if owner is None:
            super().__setattr__(name, value)
        elif not (isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"):
            # The import system also sets submodules as attributes; such an assignment must not replace a name.
            _assign(owner, value)
        if not name.startswith("__"):
            from accelerate.unread import warn_of_global

            warn_of_global(self.__name__, name, owner, value)

    def __delattr__(self, name: str) -> None:
        owner = owner_of(self.__name__, name)
        if owner is not None and owner in _originals:
            setattr(self, name, _originals[owner])
        else:
            super().__delattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *owners(self.__name__)})


def serve(address: str) -> None:
    """Make a module at an old address serve the names of the table."""
    sys.modules[address].__class__ = OldModule


def why_not(address: str) -> tuple[str, str, str] | None:
    """Why a module cannot be imported, in three parts; None if the only reason is that it does not exist.

    Args:
        address: address of the module, or of a name in a package from which it was imported.
    """
    package, _, name = address.rpartition(".")
    if owner_of(package, name) is not None:
        try:
            getattr(sys.modules[package], name)
        except UnknownName as error:
            return error.failure, error.obstacle, error.remedy
        return None
    advice = None if name.startswith("__") else _advice(package, name)
    return advice and (_failed_access(package, name), *advice)


@cache
def _join() -> None:
    """Set up logging, reports and warnings, once, when the first name is read; before, no package logs for a script."""
    from accel_state.library import add_library
    from accelerate.loggers import join_loggers
    from accelerate.private_names import watch

    # Reports that name the caller of a collective skip the lines of this package.
    add_library("accelerate")
    join_loggers()
    watch()


def _read(owner: Owner, address: str) -> Any:
    from accelerate.private_names import add_descriptors

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


def _assign(owner: Owner, value: Any) -> None:
    """Set a name in its owner, and in every other module of this project that imported it under the same name."""
    home = importlib.import_module(owner.module)
    before = getattr(home, owner.name)
    if _originals.setdefault(owner, before) is value:
        del _originals[owner]
    ours = [module for name, module in list(sys.modules.items()) if _is_ours(name)]
    for holder in [home, *(module for module in ours if vars(module).get(owner.name, ours) is before)]:
        setattr(holder, owner.name, value)
    for module in list(sys.modules.values()):
        # Old modules look the name up again.
        if isinstance(module, OldModule):
            for name in [name for name in vars(module) if owner_of(module.__name__, name) == owner]:
                del vars(module)[name]


def _is_ours(module: str) -> bool:
    from accel_state.library import OWN_PACKAGES

    return module.partition(".")[0] in OWN_PACKAGES or module.startswith("accelerate.legacy.")


def _failed_access(address: str, name: str) -> str:
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
    near = closest(name, owners(address))
    remedy = f"Import it from {homes[0]}." if homes else f"Did you mean {near}?" if near else ""
    return (_NO_NAME, remedy) if remedy else clash()
