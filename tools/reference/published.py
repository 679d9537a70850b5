"""The names that the packages publish in `__all__`, each with the module that defines it and the page that shows it.

The packages are imported, so torch is needed; autodoc mocks the engines that are not installed. A name that a package
offers at its top is documented under that address, and every other name under the address of its module.
"""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from sphinx.ext.autodoc.mock import mock  # type: ignore[attr-defined]

from accelerate.names import NAMES, owners
from reference.markdown import code

__all__ = ("ENGINES", "LIBRARY", "ROOT", "Entry", "Links", "Modules", "links_to", "published_by", "read_library")

ROOT = Path(__file__).resolve().parents[2]

LIBRARY = (
    "accel_state",
    "accel_ops",
    "accel_data",
    "accel_bigmodel",
    "accel_tracking",
    "accel_plugins",
    "accel_cli",
    "accel_megatron",
    "accel_ray",
    "accel_torchft",
    "accel_torch",
    "accel_check",
    "accel_testing",
    "accelerate",
)
"""The packages from the lowest upward."""

_UNDOCUMENTED = ("accel_testing.backends.sequences", "accel_testing.fork_server", "accel_testing.preloaded")
"""Modules that only the tests of this repository use."""

ENGINES = ("deepspeed", "megatron", "ray", "torch_xla", "torchft")
"""Libraries that modules of ours import at their top, and that need not be installed to document those modules."""

_OWN = ("accelerate.address.", "accelerate.legacy.")
"""Modules whose names the drop-in defines itself; its other names belong to the packages below."""

Modules = Mapping[str, ModuleType]
"""Every module by its name: those of the lowest package first, a package before its modules."""


class Entry(NamedTuple):
    """One published name.

    Args:
        address: where users import it from.
        home: where it is defined.
        item: the object.
        others: further addresses in the same package that lead to it.
    """

    address: str
    home: str
    item: Any
    others: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.address.rpartition(".")[2]

    @property
    def module(self) -> str:
        """The module of the address."""
        return self.address.rpartition(".")[0]

    @property
    def at_the_top(self) -> bool:
        """Whether the package itself offers it."""
        return "." not in self.module

    @property
    def kind(self) -> str:
        """Which directive of autodoc documents it: class, exception, function or data."""
        if _is_class(self.item) and self.item.__name__ == self.name:
            return "exception" if issubclass(self.item, BaseException) else "class"
        return "function" if inspect.isroutine(self.item) else "data"


def read_library(packages: Iterable[str] = LIBRARY) -> Modules:
    """Imports every module of some packages."""
    found: dict[str, ModuleType] = {}
    with mock([name for name in ENGINES if importlib.util.find_spec(name) is None]):
        for name in packages:
            found[name] = importlib.import_module(name)
            below = pkgutil.walk_packages(found[name].__path__, f"{name}.")
            names = sorted({module.name for module in below if not module.name.endswith("__main__")} - {*_UNDOCUMENTED})
            found |= {module: importlib.import_module(module) for module in names}
    return found


def published_by(package: str, modules: Modules) -> list[Entry]:
    """Every published name of a package, once, in the order of the modules that define them."""
    addresses: dict[str, list[str]] = {}
    items: dict[str, Any] = {}
    inside = {name: module for name, module in modules.items() if f"{name}.".startswith(f"{package}.")}
    if package == "accelerate":
        inside = {name: module for name, module in inside.items() if f"{name}.".startswith(_OWN)}
        for old in NAMES:
            for name, owner in owners(old).items():
                addresses.setdefault(f"{owner.module}.{owner.name}", []).append(f"{old}.{name}")
                if owner.module in inside:
                    items[f"{owner.module}.{owner.name}"] = getattr(inside[owner.module], owner.name)
    for name, module in inside.items():
        for export in sorted(set(getattr(module, "__all__", ()))):
            item = getattr(module, export)
            home = _home(export, item, name, inside)
            if home is not None and not isinstance(item, ModuleType):
                items[f"{home}.{export}"] = item
                addresses.setdefault(f"{home}.{export}", []).append(f"{name}.{export}")
    order = list(inside)
    found = []
    for home, item in sorted(items.items(), key=lambda pair: order.index(pair[0].rpartition(".")[0])):
        known = addresses[home]
        found.append(Entry(next((one for one in known if one.count(".") == 1), home), home, item, tuple(known)))
    parts = {f"{base.__module__}.{base.__name__}" for entry in found if entry.at_the_top for base in absorbed(entry)}
    return [entry for entry in found if entry.at_the_top or entry.home not in parts]


def absorbed(entry: Entry) -> list[type]:
    """The bases of a class in its own package, whose members are documented as its own."""
    package = f"{entry.home.partition('.')[0]}."
    bases = entry.item.__mro__[1:] if _is_class(entry.item) else ()
    return [base for base in bases if f"{base.__module__}.".startswith(package)]


def _home(name: str, item: Any, module: str, inside: Modules) -> str | None:
    """The module of a package that defines what one of its modules exports, or None for another package's object."""
    if (_is_class(item) or inspect.isroutine(item)) and item.__qualname__ == name and item.__module__ in inside:
        return str(item.__module__)
    # A decorator may have named another module, and values name none: then the source tells.
    annotated = "" if _is_class(item) or inspect.isroutine(item) else "|$"
    value = rf"(?:\w+, )*{name}(?:, \w+)*(?:: [^=\n]+)?(?: = {annotated})"
    defined = re.compile(rf"^\s*(?:(?:def|class) {name}\b|{value})", re.MULTILINE)
    sharing = (other for other, value in inside.items() if vars(value).get(name) is item)
    return next((other for other in (module, *sharing) if defined.search(inspect.getsource(inside[other]))), None)


def _is_class(item: Any) -> bool:
    return inspect.isclass(item) and not isinstance(item, types.GenericAlias)


class Links(NamedTuple):
    """Where names lead.

    Args:
        targets: address where something is documented, by each address it has.
        short: the same by names that can only mean one thing.
    """

    targets: Mapping[str, str]
    short: Mapping[str, str]

    def address(self, text: str) -> str | None:
        """Where what a text names is documented, or None."""
        name = text.removesuffix("()")
        return self.targets.get(name) or self.short.get(name)

    def link(self, text: str) -> str:
        """A link of markdown to what a text names, or the text as code."""
        address = self.address(text)
        if address is None:
            return code(text)
        return f"{{py:obj}}`{text.rpartition('.')[2] if text in self.targets else text} <{address}>`"


def links_to(published: Iterable[Entry]) -> Links:
    """Links to everything that is published.

    A name without dots is linked when it is that of a class: `reduce` may well be an argument.
    """
    targets: dict[str, str] = {}
    short: list[tuple[str, str]] = []
    for entry in published:
        targets |= dict.fromkeys((entry.address, entry.home, *entry.others), entry.address)
        if entry.kind in ("class", "exception"):
            short += [(entry.name, entry.address), *_methods(entry)]
    times = Counter(name for name, _ in short)
    return Links(targets, {name: address for name, address in short if times[name] == 1})


def _methods(entry: Entry) -> Iterator[tuple[str, str]]:
    """The documented methods of a class that a package offers at its top."""
    for owner in (entry.item, *absorbed(entry)) if entry.at_the_top else ():
        for name, member in vars(owner).items():
            if not name.startswith("_") and inspect.isroutine(member) and member.__doc__:
                yield f"{entry.name}.{name}", f"{entry.address}.{name}"
