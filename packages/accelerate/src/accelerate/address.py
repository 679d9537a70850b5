"""How a module at an old address works: it shows what lies in the modules that own its names.

A name is looked up in its owner when it is first read. Assigning and deleting happen in the owner, and in every module
of ours that holds the same object under that name, so `mock.patch("accelerate.utils.gather")` reaches whoever calls it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import FrameType, ModuleType
from typing import Any, Final, NoReturn

from accel_state.errors import AccelError, Missing
from accel_state.settings.extension import add_library
from accelerate.names import NAMES, NOT_PROVIDED, OWN_LOGGERS, REMOVED, VERSION, Owner, owners, served

__all__ = ("OldModule", "UnknownName", "refuse", "serve")


class UnknownName(AccelError, AttributeError):
    """Met when an attribute is asked for that a module at an old address does not have."""


# A report that names the caller of a collective passes over the lines of this package.
add_library("accelerate")

# Where a name was deleted from, until it is assigned again: `mock.patch` undoes itself in these two steps.
_deleted: Final[dict[Owner, list[ModuleType]]] = {}


class OldModule(ModuleType):
    """A module at an old address."""

    _owners: Mapping[str, Owner]

    def __getattr__(self, name: str) -> Any:
        owner = self._owners.get(name)
        if owner is not None:
            value = vars(self)[name] = _read(owner, self.__name__, sys._getframe(1))
            return value
        inside = f"{self.__name__}.{name}"
        if inside in NAMES:
            return importlib.import_module(inside)
        if name == "logger" and self.__name__ in OWN_LOGGERS:
            from accel_state.logging import get_logger

            return get_logger(self.__name__)
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise _unknown(self, name, sys._getframe(1))

    def __setattr__(self, name: str, value: Any) -> None:
        owner = self._owners.get(name)
        if owner is None:
            super().__setattr__(name, value)
        elif not (isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"):
            # Left out is the import system, which makes a submodule known to its package even where a name is alike.
            for holder in _deleted.pop(owner, None) or _holders(owner):
                setattr(holder, owner.name, value)
            _forget(owner)

    def __delattr__(self, name: str) -> None:
        owner = self._owners.get(name)
        if owner is None:
            super().__delattr__(name)
            return
        _deleted[owner] = _holders(owner)
        for holder in _deleted[owner]:
            delattr(holder, owner.name)
        _forget(owner)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._owners})


def serve(address: str) -> None:
    """Make the module at an old address show the names that the table has for it."""
    module = sys.modules[address]
    vars(module)["_owners"] = served(address)
    module.__class__ = OldModule


def refuse(address: str) -> NoReturn:
    """Say why an old module cannot be had.

    Raises:
        Missing: always.
    """
    raise Missing(f"{address} was imported.", *NOT_PROVIDED[address])


def _read(owner: Owner, address: str, caller: FrameType) -> Any:
    module = importlib.import_module(owner.module)
    try:
        return getattr(module, owner.name)
    except AttributeError:
        from accel_state.settings.versions import installed_version

        distribution = owner.module.partition(".")[0].replace("_", "-")
        raise _kind_of_error(caller)(
            f"{owner.name!r} was asked for from {address}, which has it from {owner.module}.",
            f"{distribution} {installed_version(distribution)} has none, so it does not fit accelerate {VERSION}.",
            f"Install versions that belong together: pip install --force-reinstall accelerate {distribution}",
        ) from None


def _holders(owner: Owner) -> list[ModuleType]:
    """The owner, and every other module of ours that imported the object under the same name."""
    home = importlib.import_module(owner.module)
    value = vars(home).get(owner.name, _deleted)
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("accel_")]
    return [home, *(module for module in ours if module is not home and vars(module).get(owner.name) is value)]


def _forget(owner: Owner) -> None:
    """Let every old module look the name up again."""
    for module in list(sys.modules.values()):
        if isinstance(module, OldModule):
            for name in [name for name in vars(module) if module._owners.get(name) == owner]:
                del vars(module)[name]


def _unknown(module: OldModule, name: str, caller: FrameType) -> AccelError:
    return _kind_of_error(caller)(f"{name!r} was asked for from {module.__name__}.", *_what_instead(module, name))


def _kind_of_error(caller: FrameType) -> type[AccelError]:
    """`from module import name` puts a text of its own in the place of every AttributeError."""
    from dis import opmap

    imported = caller.f_lasti >= 0 and caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]
    return Missing if imported else UnknownName


def _what_instead(module: OldModule, name: str) -> tuple[str, str]:
    """What stands in the way of an unknown name, and what to do."""
    from accel_state.settings.schema import closest

    if f"{module.__name__}.{name}" in NOT_PROVIDED:
        return NOT_PROVIDED[f"{module.__name__}.{name}"]
    if name in REMOVED:
        return f"It was removed before {VERSION.partition('+')[0]}.", REMOVED[name]
    obstacle = "There is no such name at this address."
    homes = [address for address in NAMES if name in owners(address)]
    if homes:
        return obstacle, f"Import it from {homes[0]}."
    near = closest(name, served(module.__name__))
    return obstacle, f"Did you mean {near}?" if near else f"dir({module.__name__}) lists what there is."
